"""Ranks: threads of a process, and a caller's own functions; heads and cached tokens over them."""

import gc
import multiprocessing
import queue
import threading
import time
import weakref

import numpy as np
import pytest

import mla

LENGTHS = (37, 90)
PAGE = 16


def on_ranks(group, work):
    """work(communicator) of each on a thread; results and errors by rank. One that raises leaves."""
    results, errors = [None] * len(group), [None] * len(group)

    def run(rank):
        try:
            with group[rank] as comm:
                results[rank] = work(comm)
        except Exception as e:
            errors[rank] = e

    threads = [threading.Thread(target=run, args=(r,)) for r in range(len(group))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
        assert not t.is_alive(), "a rank hangs"
    return results, errors


def results_of(group, work):
    results, errors = on_ranks(group, work)
    for e in errors:
        if e is not None:
            raise e
    return results


class Queues:
    """Connections as a caller has them: a queue from each rank to each."""

    def __init__(self, ranks):
        self.boxes = [[queue.Queue() for _ in range(ranks)] for _ in range(ranks)]
        self.why = None
        self.ranks = ranks

    def communicator(self, rank):
        def exchange(step, seconds, send, receive):
            end = time.monotonic() + seconds
            for to, message in enumerate(send):
                if message:
                    self.boxes[rank][to].put(bytes(message))
            for source, into in enumerate(receive):
                while into:
                    if self.why:
                        failure = mla.RankError(self.why[1])
                        failure.rank = self.why[0]
                        raise failure
                    try:
                        message = self.boxes[source][rank].get(timeout=0.01)
                    except queue.Empty:
                        if time.monotonic() < end:
                            continue
                        late = mla.RankError(f"rank {source} is late")
                        late.rank = source
                        raise late from None
                    into[:] = message
                    break

        def abort(rank_, reason):
            self.why = self.why or (rank_, reason)

        return mla.Communicator(rank, self.ranks, exchange, abort)

    @classmethod
    def group(cls, ranks):
        own = cls(ranks)
        return [own.communicator(r) for r in range(ranks)]


GROUPS = {"threads": mla.thread_communicators, "functions": Queues.group}


def batch_of(tables, parts, sharding=None, rank=0):
    """Tokens [begin, end) of each request: all of them, or with the slots that a rank holds."""
    sharding = sharding or mla.CacheSharding(1)
    slots = [
        sharding.slot(rank, t, tables[r], PAGE)
        for r, (begin, end) in enumerate(parts)
        for t in range(begin, end)
    ]
    starts = np.cumsum([0] + [end - begin for begin, end in parts])
    return mla.Batch(starts.tolist(), [end for _, end in parts], tables, slots)


def steps(model, hidden, comm=None, interleave=0, stream=None, members=0, exchange="latents", **options):
    """Prefills of most of each request, then the rest: what forward() gives for both.

    members: of a group that shares a cache; 0: all ranks. exchange: what its ranks send each other.
    """
    ranks, rank = (comm.ranks, comm.rank) if comm else (1, 0)
    heads = [mla.head_share(model.heads, r, ranks) for r in range(ranks)]
    members = members or ranks
    first = rank - rank % members
    group = heads[first : first + members] if exchange == "heads" else []
    part = mla.part_of(model, heads[rank])
    tensors = mla.part_of(model, mla.random_layer(model, 0, 3, "f32"), heads[rank], group)
    weights = mla.prepare(part, tensors, dtype="f32")
    rotary = mla.RotaryTable(part, 128)
    sharding = mla.CacheSharding(members, interleave) if interleave else mla.CacheSharding(1)
    if interleave:
        options |= {
            "sharding": sharding, "rank": rank, "rank_heads": [count for _, count in heads],
            "exchange": exchange,
        }
    holder = rank % members if interleave else 0
    pages = [sharding.pages(holder, n, PAGE) for n in LENGTHS]
    order = np.random.default_rng(rank).permutation(sum(pages)).tolist()
    tables = [order[: pages[0]], order[pages[0] :]]
    cache = mla.Cache(mla.cache_spec(part, "f32", PAGE), sum(pages))
    out = []
    for parts in ([(0, 33), (0, 80)], [(33, 37), (80, 90)]):
        batch = batch_of(tables, parts, sharding, holder)
        plan = mla.plan(
            part, cache, batch, options=mla.PlanOptions(tensor_parallel=ranks, **options)
        )
        rows = np.concatenate([hidden[r][begin:end] for r, (begin, end) in enumerate(parts)])
        out.append(mla.forward(plan, weights, rotary, cache, rows, ranks=comm, stream=stream))
    return out


@pytest.fixture(scope="module")
def model():
    model = mla.preset("deepseek-v2-lite")
    model.hidden, model.heads = 256, 5
    return model


@pytest.fixture(scope="module")
def hidden(model):
    rng = np.random.default_rng(2)
    return [rng.standard_normal((n, model.hidden)).astype(np.float32) for n in LENGTHS]


@pytest.fixture(scope="module")
def right(model, hidden):
    return steps(model, hidden)


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("interleave", [0, 1, 16])
def test_ranks_give_the_layers_rows(model, hidden, right, kind, ranks, interleave):
    found = results_of(GROUPS[kind](ranks), lambda c: steps(model, hidden, c, interleave))
    for rank in range(ranks):
        for got, want in zip(found[rank], right, strict=True):
            assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
            # The same bits on every rank.
        assert all(np.array_equal(a, b) for a, b in zip(found[rank], found[0], strict=True))
    other = GROUPS["threads" if kind == "functions" else "functions"](ranks)
    again = results_of(other, lambda c: steps(model, hidden, c, interleave))
    assert all(np.array_equal(a, b) for a, b in zip(again[0], found[0], strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
def test_context_on_the_expanded_path(model, hidden, ranks):
    want = steps(model, hidden, path="expanded")
    found = results_of(
        mla.thread_communicators(ranks), lambda c: steps(model, hidden, c, 4, path="expanded")
    )
    for rows in found:
        for got, right in zip(rows, want, strict=True):
            assert np.abs(got - right).max() < 1e-5 * np.abs(right).max()


def test_ranks_that_select(model, hidden):
    """The indexer's cache is split, too: the second step's rows are those that one rank selects and gives."""
    sparse = mla.preset("deepseek-v3.2")
    sparse.hidden, sparse.heads, sparse.query_latent = model.hidden, model.heads, 64
    indexer = sparse.indexer
    indexer.heads, indexer.topk = 4, 24
    sparse.indexer = indexer

    def work(comm=None):
        ranks, rank = (comm.ranks, comm.rank) if comm else (1, 0)
        heads = [mla.head_share(sparse.heads, r, ranks) for r in range(ranks)]
        part = mla.part_of(sparse, heads[rank])
        tensors = mla.part_of(sparse, mla.random_layer(sparse, 0, 3, "f32"), heads[rank])
        weights = mla.prepare(part, tensors, dtype="f32")
        sharding = mla.CacheSharding(2, 4) if comm else mla.CacheSharding(1)
        holder = rank % 2 if comm else 0
        tables = [list(range(p)) for p in [sharding.pages(holder, LENGTHS[1], PAGE)]]
        cache = mla.Cache(mla.cache_spec(part, "f32", PAGE), len(tables[0]))
        index = mla.IndexCache(part, cache)
        options = {}
        if comm:
            options |= {
                "tensor_parallel": ranks, "sharding": sharding, "rank": rank,
                "rank_heads": [count for _, count in heads],
            }
        out = []
        for first, last in ((0, 80), (80, 90)):
            batch = batch_of(tables, [(first, last)], sharding, holder)
            plan = mla.plan(part, cache, batch, options=mla.PlanOptions(**options))
            out.append(
                mla.forward(
                    plan, weights, mla.RotaryTable(part, 128), cache, hidden[1][first:last],
                    index_cache=index, index_rotary=mla.RotaryTable(part, 128, indexer=True),
                    ranks=comm,
                )
            )
        return out

    want = work()
    for rows in results_of(mla.thread_communicators(4), work):
        for got, right in zip(rows, want, strict=True):
            assert np.abs(got - right).max() < 1e-5 * np.abs(right).max()


def test_ranks_sum_their_own_rows(model, hidden, right):
    ranges = {}

    def work(comm, sums):
        heads = mla.head_share(model.heads, comm.rank, comm.ranks)
        part = mla.part_of(model, heads)
        tensors = mla.part_of(model, mla.random_layer(model, 0, 3, "f32"), heads)
        weights = mla.prepare(part, tensors, dtype="f32")
        cache = mla.Cache(mla.cache_spec(part, "f32", PAGE), 4)
        options = mla.PlanOptions(tensor_parallel=comm.ranks, sums=sums, rank=comm.rank * (sums == "own"))
        plan = mla.plan(part, cache, batch_of([[2, 0, 1]], [(0, 33)]), options=options)
        ranges[comm.rank, sums] = plan.own_rows
        return mla.forward(plan, weights, mla.RotaryTable(part, 128), cache, hidden[0][:33], ranks=comm)

    whole = results_of(mla.thread_communicators(3), lambda comm: work(comm, "all"))
    own = results_of(mla.thread_communicators(3), lambda comm: work(comm, "own"))
    for rank in range(3):
        assert ranges[rank, "all"] == (0, 33)
        assert ranges[rank, "own"] == (11 * rank, 11)
        assert own[rank].shape == (11, model.hidden)
        assert np.array_equal(own[rank], whole[rank][11 * rank : 11 * rank + 11])
    with pytest.raises(mla.InputError, match="rank is read with sharding"):
        mla.PlanOptions(tensor_parallel=2, rank=1)
    with pytest.raises(mla.InputError, match="exchange are read with sharding"):
        mla.PlanOptions(tensor_parallel=2, exchange="heads")


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("exchange", ["latents", "heads"])
def test_groups_of_ranks_share_a_cache(model, hidden, right, interleave, exchange):
    def work(comm):
        return steps(model, hidden, comm, interleave, members=2, exchange=exchange, path="latent")

    found = results_of(mla.thread_communicators(4), work)
    for rank in range(4):
        for got, want in zip(found[rank], right, strict=True):
            assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
        assert all(np.array_equal(a, b) for a, b in zip(found[rank], found[0], strict=True))
    again = results_of(Queues.group(4), work)
    assert all(np.array_equal(a, b) for a, b in zip(again[0], found[0], strict=True))


def test_attention_of_a_split_cache(model):
    """attend() with ranks: each rank's own heads, over tokens that all hold."""
    rng = np.random.default_rng(5)
    tokens, context = 3, 40

    def floats(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    q, kv_c, k_pe = (
        floats(context + tokens, model.heads, model.query_key),
        floats(context + tokens, model.latent),
        floats(context + tokens, model.rope),
    )

    def work(comm=None):
        ranks, rank = (comm.ranks, comm.rank) if comm else (1, 0)
        heads = [mla.head_share(model.heads, r, ranks) for r in range(ranks)]
        begin, count = heads[rank]
        part = mla.part_of(model, heads[rank])
        tensors = mla.part_of(model, mla.random_layer(model, 0, 3, "f32"), heads[rank])
        weights = mla.prepare(part, tensors, dtype="f32")
        rotary = mla.RotaryTable(part, 64)
        sharding = mla.CacheSharding(ranks, 2)
        table = [list(range(sharding.pages(rank, context + tokens, PAGE)))]
        cache = mla.Cache(mla.cache_spec(part, "f32", PAGE), len(table[0]))
        options = mla.PlanOptions(form="attention", path="latent")
        if comm:
            options = mla.PlanOptions(
                form="attention", path="latent", tensor_parallel=ranks, sharding=sharding,
                rank=rank, rank_heads=[n for _, n in heads],
            )
        for first, last in ((0, context), (context, context + tokens)):
            plan = mla.plan(
                part, cache, batch_of(table, [(first, last)], sharding, rank), options=options
            )
            at = slice(first, last)
            own = np.ascontiguousarray(q[at, begin : begin + count])
            out = mla.attend(
                plan, weights, rotary, cache, own, kv_c[at], k_pe[at], ranks=comm
            )
        return out

    whole = work()
    parts = results_of(mla.thread_communicators(3), work)
    assert np.abs(np.concatenate(parts, axis=1) - whole).max() < 1e-5 * np.abs(whole).max()


def over_pipes(rank, ends, model_heads, results):
    """A process of its own: `ends` are its pipes to the others, in the place of sockets."""
    model = mla.preset("deepseek-v2-lite")
    model.hidden, model.heads = 256, model_heads
    rng = np.random.default_rng(2)
    hidden = [rng.standard_normal((n, model.hidden)).astype(np.float32) for n in LENGTHS]

    def exchange(step, seconds, send, receive):
        end = time.monotonic() + seconds
        for to, message in enumerate(send):
            if message:
                ends[to].send_bytes(message)
        for source, into in enumerate(receive):
            if into:
                if not ends[source].poll(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"rank {source} is late")
                ends[source].recv_bytes_into(into)

    with mla.Communicator(rank, len(ends), exchange) as comm:
        results.put((rank, [x.tobytes() for x in steps(model, hidden, comm, 4)]))


def test_processes(model, hidden):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    results = context.Queue()
    ends = [[None, here], [there, None]]
    workers = [
        context.Process(target=over_pipes, args=(r, ends[r], model.heads, results))
        for r in range(2)
    ]
    for w in workers:
        w.start()
    found = dict(results.get(timeout=120) for _ in workers)
    for w in workers:
        w.join(60)
        assert w.exitcode == 0
    threads = results_of(mla.thread_communicators(2), lambda c: steps(model, hidden, c, 4))
    assert found[0] == found[1] == [x.tobytes() for x in threads[0]]


@pytest.mark.parametrize("kind", GROUPS)
def test_a_rank_that_fails_is_named(kind):
    def one_raises(comm):
        comm.barrier("first")
        if comm.rank == 1:
            raise ValueError("no more pages")
        comm.barrier("second", seconds=20)

    start = time.monotonic()
    _, errors = on_ranks(GROUPS[kind](3), one_raises)
    assert time.monotonic() - start < 10
    assert isinstance(errors[1], ValueError)
    for e in (errors[0], errors[2]):
        assert isinstance(e, mla.RankError) and isinstance(e, mla.DeviceError)
        assert e.rank == 1 and "ValueError: no more pages" in str(e)

    def one_is_late(comm):
        if comm.rank == 2:
            time.sleep(1.5)
        else:
            comm.barrier("wait", seconds=0.5)

    start = time.monotonic()
    _, errors = on_ranks(GROUPS[kind](3), one_is_late)
    assert time.monotonic() - start < 3
    assert {e.rank for e in errors[:2]} == {2} and errors[0].step == "wait"

    def other_call(comm):
        comm.barrier("one" if comm.rank else "two", seconds=20)

    _, errors = on_ranks(GROUPS[kind](3), other_call)
    assert all(e.rank == 0 and "step 'two'" in str(e) for e in errors)


@pytest.mark.parametrize("kind", GROUPS)
def test_a_rank_with_another_plan_is_named(model, hidden, kind):
    def work(comm):
        split = "batch_invariant" if comm.rank == 1 else "fast"
        return steps(model, hidden, comm, split=split)

    _, errors = on_ranks(GROUPS[kind](3), work)
    for e in errors:
        assert isinstance(e, mla.RankError)
        assert e.rank == 1 and e.step == "gather_kv_down" and "their plans differ" in str(e)


def test_functions_that_fail():
    def group_of(exchange, abort=None):
        return mla.Communicator(0, 2, exchange, abort)

    def raises(*_):
        raise OSError("the cable is out")

    told = []
    comm = group_of(raises, lambda rank, reason: told.append((rank, reason)))
    for _ in range(2):  # it stays so
        with pytest.raises(mla.RankError, match="exchange raised OSError: the cable is out") as e:
            comm.barrier("b")
        assert e.value.rank == 0 and e.value.step == "b"
    assert len(told) == 1 and told[0][0] == 0

    def blames(*_):
        error = mla.RankError("rank 1 hung up")
        error.rank = 1
        raise error

    with pytest.raises(mla.RankError, match="rank 1 hung up") as e:
        group_of(blames).barrier()
    assert e.value.rank == 1

    def replaces(step, seconds, send, receive):
        receive[1] = b"x" * len(receive[1])

    with pytest.raises(mla.RankError, match=r"receive\[1\] is not the bytearray"):
        group_of(replaces).barrier()

    def grows(step, seconds, send, receive):
        receive[1].extend(b"x")

    with pytest.raises(mla.RankError, match=r"receive\[1\] is not the bytearray"):
        group_of(grows).barrier()

    # Nothing is brought: the others' records are zeros, which are no call of theirs.
    with pytest.raises(mla.RankError):
        group_of(lambda *_: None).barrier()


def test_a_communicator_of_its_owners_methods_is_collected():
    class Owner:
        def __init__(self):
            self.comm = mla.Communicator(0, 2, self.exchange, self.abort)

        def exchange(self, *_):
            raise OSError

        def abort(self, *_):
            pass

    owner = Owner()
    with pytest.raises(mla.RankError):
        owner.comm.barrier()
    gone = weakref.ref(owner), weakref.ref(owner.comm)
    del owner
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_what_cannot_be(model, hidden):
    with pytest.raises(mla.InputError, match="ranks is 0"):
        mla.thread_communicators(0)
    with pytest.raises(mla.InputError, match="rank is 2, allowed 0 to 1"):
        mla.Communicator(2, 2, print)
    with pytest.raises(TypeError):
        mla.Communicator(0, 2, None)
    with pytest.raises(TypeError, match="abort"):
        mla.Communicator(0, 2, print, 3)
    with pytest.raises(mla.InputError, match="head_share: ranks is 6, allowed 1 to 5"):
        mla.head_share(5, 0, 6)
    with pytest.raises(mla.InputError, match="part_of: heads"):
        mla.part_of(model, (3, 3))
    with pytest.raises(mla.InputError, match="read with sharding"):
        mla.PlanOptions(rank=1)
    with pytest.raises(mla.ShapeError, match="split over 2 ranks with tensor_parallel 1"):
        steps(model, hidden, sharding=mla.CacheSharding(2), rank_heads=[5, 5])
    one, two = mla.thread_communicators(2)
    assert (two.rank, two.ranks) == (1, 2) and repr(two) == "mla.Communicator(rank=1, ranks=2)"
    for bad in (0, -1, float("nan"), 1e9):
        with pytest.raises(mla.InputError, match="seconds is"):
            one.barrier(seconds=bad)
    with pytest.raises(mla.InputError, match="step's name of 64 bytes"):
        one.barrier("x" * 64)
    with pytest.raises(mla.InputError, match="connect on cpu"):
        one.connect("cpu")
    one.leave()
    one.leave()
    one.abort("nobody is told")
    with pytest.raises(mla.InputError, match="rank 0 has left its group"):
        one.barrier()
    with pytest.raises(mla.RankError, match="rank 0 has left the group"):
        two.barrier()


def test_a_plan_of_ranks_needs_them(model, hidden):
    alone = mla.thread_communicators(3)[0]
    part = mla.part_of(model, mla.head_share(model.heads, 0, 2))
    tensors = mla.part_of(
        model, mla.random_layer(model, 0, 3, "f32"), mla.head_share(model.heads, 0, 2)
    )
    weights = mla.prepare(part, tensors, dtype="f32")
    rotary = mla.RotaryTable(part, 128)
    cache = mla.Cache(mla.cache_spec(part, "f32", PAGE), 1)
    plan = mla.plan(
        part, cache, batch_of([[0]], [(0, 4)]), options=mla.PlanOptions(tensor_parallel=2)
    )
    with pytest.raises(mla.ShapeError, match="ranks is missing, plan was made for tensor_parallel"):
        mla.forward(plan, weights, rotary, cache, hidden[0][:4])
    with pytest.raises(mla.ShapeError, match="ranks is 3, plan tensor_parallel is 2"):
        mla.forward(plan, weights, rotary, cache, hidden[0][:4], ranks=alone)


def over_gloo(rank, ranks, file, model_heads, results):
    """docs/parallel.md's functions over torch.distributed."""
    import datetime

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)

    def exchange(step, seconds, send, receive):
        def of(message):
            return torch.frombuffer(message, dtype=torch.uint8)

        ops = [dist.P2POp(dist.isend, of(m), r) for r, m in enumerate(send) if m]
        ops += [dist.P2POp(dist.irecv, of(m), r) for r, m in enumerate(receive) if m]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait(datetime.timedelta(seconds=seconds))

    model = mla.preset("deepseek-v2-lite")
    model.hidden, model.heads = 256, model_heads
    rng = np.random.default_rng(2)
    hidden = [rng.standard_normal((n, model.hidden)).astype(np.float32) for n in LENGTHS]
    with mla.Communicator(rank, ranks, exchange) as comm:
        found = [x.tobytes() for x in steps(model, hidden, comm, 4)]
        dist.barrier()
        late = None
        if rank != 1:
            try:
                comm.barrier("late", seconds=1.0)
            except mla.RankError as e:
                late = (e.rank, e.step)
        else:
            time.sleep(3)
    results.put((rank, found, late))


def test_torch_distributed(model, hidden, tmp_path):
    pytest.importorskip("torch")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(
            target=over_gloo, args=(r, 3, tmp_path / "store", model.heads, results), daemon=True
        )
        for r in range(3)
    ]
    for w in workers:
        w.start()
    found = [results.get(timeout=120) for _ in workers]
    threads = results_of(mla.thread_communicators(3), lambda c: steps(model, hidden, c, 4))
    for rank, out, late in found:
        assert out == [x.tobytes() for x in threads[0]]
        assert rank == 1 or (late is not None and late[1] == "late"), late
    for w in workers:
        w.join(60)
