'use strict';
// Draws the report from the JSON in #data. Text from the data reaches the page as text nodes alone.

const errors = [];
addEventListener('error', (e) => errors.push(e.message));
addEventListener('unhandledrejection', (e) => errors.push(String(e.reason)));
document.addEventListener('securitypolicyviolation', (e) => errors.push('blocked: ' + e.violatedDirective));

const data = JSON.parse(document.getElementById('data').textContent);

// ---- Elements

function add(parent, child) {
  if (child === null || child === undefined || child === false) return;
  if (Array.isArray(child)) child.forEach((c) => add(parent, c));
  else parent.append(child);  // an Element, or a text that becomes a text node
}
function el(name, attributes, ...children) {
  const e = document.createElement(name);
  for (const [k, v] of Object.entries(attributes || {})) if (v !== false) e.setAttribute(k, v);
  add(e, children);
  return e;
}
function sv(name, attributes, ...children) {
  const e = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [k, v] of Object.entries(attributes || {})) e.setAttribute(k, v);
  add(e, children);
  return e;
}
const clear = (e) => { while (e.firstChild) e.firstChild.remove(); };

// ---- Numbers

const sum = (values) => values.reduce((a, b) => a + b, 0);
const ratio = (a, b) => (b > 0 ? a / b : 0);
const isNumber = (v) => typeof v === 'number' && Number.isFinite(v);
const grouped = (text) => {
  const [whole, part] = text.split('.');
  return whole.replace(/\B(?=(\d{3})+$)/g, '\u202f') + (part === undefined ? '' : '.' + part);
};
const fixed = (v, digits) => (isNumber(v) ? grouped(v.toFixed(digits)) : '–');
const count = (v) => fixed(v, 0);
const things = (n, what) => `${count(n)} ${what}${n === 1 ? '' : 's'}`;
const threads = (n) => things(n, 'thread');
// Three digits that count, without an exponent.
function short(v) {
  if (!isNumber(v)) return '–';
  const a = Math.abs(v);
  return fixed(v, a >= 100 || a === 0 ? 0 : a >= 10 ? 1 : a >= 1 ? 2 : Math.min(6, 2 - Math.floor(Math.log10(a))));
}
function scaled(v, unit) {  // 12300000 -> 12.3 M
  for (const [size, prefix] of [[1e15, 'P'], [1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']])
    if (Math.abs(v) >= size) return short(v / size) + ' ' + prefix + unit;
  return short(v) + (unit ? ' ' + unit : '');
}
// A rate among the first figures: six digits and more do not fit.
const rate = (v) => (isNumber(v) && v >= 1e5 ? scaled(v, '') : short(v));
const time = (s) => (!isNumber(s) ? '–' : s >= 1 ? short(s) + ' s' : s >= 1e-3 ? short(s * 1e3) + ' ms' : short(s * 1e6) + ' µs');
// One unit for a column of times, so that their points stand below each other.
function timeColumn(values) {
  const top = Math.max(...values, 0), [unit, by] = top >= 10 ? ['s', 1] : top >= 0.01 ? ['ms', 1e3] : ['µs', 1e6];
  return {unit, of: (v) => fixed(v * by, unit === 's' ? 3 : 2)};
}
const percent = (share, digits = 1) => fixed(100 * share, digits) + ' %';
const bytes = (b) => (b >= 2 ** 30 ? fixed(b / 2 ** 30, 2) + ' GiB' : b >= 2 ** 20 ? fixed(b / 2 ** 20, 1) + ' MiB' : fixed(b / 2 ** 10, 1) + ' KiB');
const flopRate = (gflops) => scaled(gflops * 1e9, 'FLOP/s');

function ticks(low, high, about) {
  const raw = (high - low) / Math.max(1, about) || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i) out.push(i * step);
  return out;
}
function tickText(v, all, unit) {
  const top = Math.max(...all.map(Math.abs)), step = all.length > 1 ? all[1] - all[0] : top;
  const [size, prefix] = [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e4, 'k']].find(([s]) => top >= s) || [1, ''];
  const by = prefix === 'k' ? 1e3 : size;
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step / by || 1) + 1e-9)));
  return (v ? fixed(v / by, digits) : '0') + ((prefix && v) || unit ? '\u2009' + (v ? prefix : '') + (unit || '') : '');
}

// ---- Theme

(function theme() {
  const button = document.getElementById('theme'), root = document.documentElement;
  const system = matchMedia('(prefers-color-scheme: dark)');
  let chosen = null;
  const apply = () => {
    const dark = chosen === null ? system.matches : chosen === 'dark';
    root.dataset.theme = dark ? 'dark' : 'light';
    button.textContent = dark ? 'Light theme' : 'Dark theme';
  };
  button.addEventListener('click', () => {
    chosen = root.dataset.theme === 'dark' ? 'light' : 'dark';
    apply();
  });
  system.addEventListener('change', apply);
  button.hidden = false;
  apply();
})();

// ---- Tooltip: one for the page, also read aloud when the keyboard moves it

const tip = document.getElementById('tip');
function showTip(x, y, title, lines) {
  clear(tip);
  add(tip, el('b', {}, title));
  for (const [name, value] of lines) add(tip, el('div', {}, el('span', {}, name), el('span', {}, value)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), width = document.documentElement.clientWidth;
  tip.style.left = Math.max(8, Math.min(x + 14, width - box.width - 8)) + 'px';
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 18) + 'px';
}
function hideTip() { tip.hidden = true; }
addEventListener('scroll', hideTip, {passive: true});

// ---- Charts

// Shapes beside colours, so that neither alone tells series apart.
const shapes = [
  (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
  (x, y, r) => `M${x - r * 0.9} ${y - r * 0.9}h${r * 1.8}v${r * 1.8}h${-r * 1.8}Z`,
  (x, y, r) => `M${x} ${y - r * 1.2}L${x + r * 1.1} ${y + r * 0.8}H${x - r * 1.1}Z`,
  (x, y, r) => `M${x} ${y - r * 1.25}L${x + r * 1.25} ${y}L${x} ${y + r * 1.25}L${x - r * 1.25} ${y}Z`,
  (x, y, r) => `M${x} ${y + r * 1.2}L${x + r * 1.1} ${y - r * 0.8}H${x - r * 1.1}Z`,
];
const color = (i) => `var(--s${i % 5 + 1})`;

let charts = 0;
/* A figure: heading, legend, plot, table. `draw(svg, width)` fills an empty SVG of that width and returns its height, a
   list of points {x, y, title, lines} to visit by pointer and keys, and how a visit is marked. */
function chart({title, description, legend, draw, table, wide, tall, nearest}) {
  const id = 'chart' + ++charts;
  const plot = el('div', {class: 'plot'});
  const figure = el('figure', {class: 'card' + (wide ? ' wide' : '') + (tall ? ' tall' : ''), id},
    el('figcaption', {}, el('h3', {}, title),
      legend && el('ul', {class: 'legend'}, legend.map((l) => el('li', {}, key(l), l.name)))),
    plot);
  if (table) add(figure, lazyTable(title, table));
  let width = 0, view = null, at = -1;

  function render(forced) {
    const now = forced || Math.floor(plot.clientWidth);
    if (now === width || now === 0) return;
    width = now;
    at = -1;
    const svg = sv('svg', {role: 'img', tabindex: '0', 'aria-label': title, 'aria-describedby': id + 'd', 'data-chart': title});
    const named = sv('title', {}, title);
    add(svg, named);
    add(svg, sv('desc', {id: id + 'd'}, description + ' Arrow keys read the values.'));
    view = draw(svg, width);
    svg.setAttribute('viewBox', `0 0 ${width} ${view.height}`);
    svg.setAttribute('height', view.height);
    // The browser shows <title> as a tooltip, which would cover ours.
    svg.addEventListener('pointerenter', () => { named.textContent = ''; });
    svg.addEventListener('pointerleave', () => { named.textContent = title; });
    svg.addEventListener('pointermove', point);
    svg.addEventListener('pointerdown', point);
    svg.addEventListener('pointerleave', leave);
    svg.addEventListener('blur', leave);
    svg.addEventListener('keydown', press);
    clear(plot);
    add(plot, svg);
    view.svg = svg;
    view.mark = sv('g', {'aria-hidden': 'true'});
    add(svg, view.mark);
  }
  function visit(index, x, y) {
    at = index;
    const p = view.points[at];
    clear(view.mark);
    add(view.mark, p.cursor ? p.cursor() : sv('circle', {class: 'ring', cx: p.x, cy: p.y, r: 8}));
    showTip(x, y, p.title, p.lines());
  }
  function point(e) {
    const box = view.svg.getBoundingClientRect(), k = width / box.width;
    const x = (e.clientX - box.left) * k, y = (e.clientY - box.top) * k;
    let best = -1, distance = nearest === 'xy' ? 30 : Infinity;
    view.points.forEach((p, i) => {
      const d = nearest === 'xy' ? Math.hypot(p.x - x, p.y - y) : nearest === 'y' ? Math.abs(p.y - y) : Math.abs(p.x - x);
      if (d < distance) [best, distance] = [i, d];
    });
    if (best < 0) leave();
    else visit(best, e.clientX, e.clientY);
  }
  function press(e) {
    const last = view.points.length - 1;
    if (e.key === 'Escape') return leave();
    const to = {ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last,
                PageDown: at + 10, PageUp: at - 10}[e.key];
    if (to === undefined || last < 0) return;
    e.preventDefault();
    const box = view.svg.getBoundingClientRect(), index = Math.max(0, Math.min(last, to)), p = view.points[index];
    visit(index, box.left + p.x * box.width / width, box.top + p.y * box.width / width);
  }
  function leave() {
    if (view) clear(view.mark);
    hideTip();
  }
  // Not within the observer's turn: what it draws changes sizes again.
  new ResizeObserver(() => requestAnimationFrame(() => render())).observe(plot);
  figure.render = render;
  figure.printWidth = wide || tall ? 680 : 330;
  return figure;
}
function key(l) {
  const s = sv('svg', {viewBox: '0 0 12 10', 'aria-hidden': 'true'});
  if (l.hollow) add(s, sv('path', {d: shapes[0](6, 5, 3.5), style: 'fill:none;stroke:var(--ink);stroke-width:1.3'}));
  else if (l.shape !== undefined) add(s, sv('path', {d: shapes[l.shape](6, 5, 4), style: `fill:${color(l.series)}`}));
  else if (l.line) add(s, sv('path', {d: 'M0 5H12', style: `stroke:${color(l.series)};stroke-width:2${l.dash ? ';stroke-dasharray:3 2' : ''}`}));
  else add(s, sv('rect', {width: 11, height: 10, rx: 1, style: `fill:${color(l.series)};opacity:${l.opacity || 1}`}));
  return s;
}
const text = (x, y, anchor, content, attributes) => sv('text', {x, y, 'text-anchor': anchor, ...attributes}, content);

/* Values over buckets [from, to]: areas stacked as bars of the buckets' width, lines level over each bucket. */
function seriesChart({title, description, from, to, xUnit, xName, series, yUnit, yTop, heading, extra, wide}) {
  const stack = series.filter((s) => !s.line);
  const height = 210, n = from.length;
  const totals = from.map((_, i) => Math.max(sum(stack.map((s) => s.values[i])), ...series.filter((s) => s.line).map((s) => s.values[i])));
  const top = yTop || Math.max(...totals, 0) * 1.04 || 1;
  return chart({
    title, description, wide,
    legend: series.length > 1 ? series : null,
    table: () => ({
      columns: [{name: xName}, ...series.map((s) => ({name: s.name + (yUnit && yUnit !== '%' ? ', ' + yUnit : '')}))],
      rows: from.map((_, i) => [heading(i), ...series.map((s) => s.format(s.values[i]))]),
    }),
    draw(svg, width) {
      const yTicks = ticks(0, top, 4), left = 14 + 6.3 * Math.max(...yTicks.map((t) => tickText(t, yTicks, yUnit === '%' ? '%' : '').length));
      const right = 10, above = 20, bottom = height - 34, x0 = from[0] || 0, x1 = n ? to[n - 1] : 1;
      const x = (v) => left + (v - x0) / (x1 - x0 || 1) * (width - left - right);
      const y = (v) => bottom - v / top * (bottom - above);
      for (const t of yTicks) {
        add(svg, sv('path', {class: t ? 'gridline' : 'axis', d: `M${left} ${y(t)}H${width - right}`}));
        add(svg, text(left - 5, y(t) + 4, 'end', tickText(t, yTicks, yUnit === '%' ? '%' : '')));
      }
      if (yUnit !== '%') add(svg, text(2, 10, 'start', yUnit));
      const xTicks = ticks(x0, x1, Math.min(10, width / 70));
      for (const t of xTicks) {
        add(svg, sv('path', {class: 'axis', d: `M${x(t)} ${bottom}v4`}));
        add(svg, text(Math.min(x(t), width - 12), bottom + 16, 'middle', tickText(t, xTicks, '')));
      }
      add(svg, text(width - right, height - 4, 'end', xUnit));
      if (n === 0) add(svg, text(width / 2, (above + bottom) / 2, 'middle', 'no step was run'));
      const base = from.map(() => 0);
      for (const s of stack) {
        let d = '';
        for (let i = 0; i < n; ++i) {
          if (!(s.values[i] > 0)) continue;
          const a = x(from[i]), w = Math.max(0.6, x(to[i]) - a - (x(to[i]) - a > 6 ? 1 : 0));
          d += `M${a.toFixed(2)} ${y(base[i]).toFixed(2)}V${y(base[i] + s.values[i]).toFixed(2)}h${w.toFixed(2)}V${y(base[i]).toFixed(2)}Z`;
          base[i] += s.values[i];
        }
        if (d) add(svg, sv('path', {class: 'mark', d, style: `fill:${color(s.series)};opacity:${s.opacity || 1}`}));
      }
      for (const s of series.filter((l) => l.line)) {
        const d = from.map((a, i) => `${i ? 'L' : 'M'}${x(a).toFixed(2)} ${y(s.values[i]).toFixed(2)}H${x(to[i]).toFixed(2)}`).join('');
        if (n) add(svg, sv('path', {class: 'mark', d,
          style: `fill:none;stroke:${color(s.series)};stroke-width:1.6;stroke-linejoin:round${s.dash ? ';stroke-dasharray:4 3' : ''}`}));
      }
      const points = from.map((a, i) => {
        const px = x((a + to[i]) / 2), py = y(Math.min(top, totals[i])), w = Math.max(2, x(to[i]) - x(a));
        return {x: px, y: py, title: heading(i),
                lines: () => [...series.map((s) => [s.name, s.format(s.values[i]) + (yUnit && yUnit !== '%' ? ' ' + yUnit : '')]), ...(extra ? extra(i) : [])],
                cursor: () => sv('rect', {class: 'cursor', x: px - w / 2, y: above, width: w, height: bottom - above})};
      });
      return {height, points};
    },
  });
}

/* Bars of ops' time; the full part is the time that the machine's roof would need. */
function opBars(ops, total) {
  return chart({
    title: 'Time by op',
    description: 'Seconds of each op over the run, and the part of them that the measured roof would need.',
    legend: [{name: 'needed at the roof', series: 0}, {name: 'above it', series: 0, opacity: 0.38}],
    nearest: 'y', tall: true,
    draw(svg, width) {
      const row = 25, left = Math.min(118, width * 0.34), top = Math.max(...ops.map((o) => o.seconds), 1e-12);
      const spent = timeColumn(ops.map((o) => o.seconds)), right = 66 + 6.4 * Math.max(...ops.map((o) => `${spent.of(o.seconds)} ${spent.unit}`.length));
      const points = ops.map((o, i) => {
        const y = i * row + 5, w = o.seconds / top * (width - left - right), part = Math.min(1, (o.percent_of_roof || 0) / 100);
        add(svg, text(left - 8, y + 12, 'end', o.op, {class: 'strong'}));
        add(svg, sv('rect', {class: 'mark', x: left, y: y + 1, width: Math.max(w, 0.5), height: 14, rx: 1.5, style: `fill:${o.rest ? 'var(--s5)' : color(0)};opacity:.38`}));
        if (part > 0) add(svg, sv('rect', {x: left, y: y + 1, width: w * part, height: 14, rx: 1.5, style: `fill:${color(0)}`}));
        add(svg, text(width - 50, y + 12, 'end', `${spent.of(o.seconds)} ${spent.unit}`));
        add(svg, text(width, y + 12, 'end', percent(ratio(o.seconds, total))));
        return {x: left + w, y: y + 8, title: o.op, lines: () => opLines(o, total),
                cursor: () => sv('rect', {class: 'ring', x: left - 1, y, width: Math.max(w, 1) + 2, height: 16, rx: 2})};
      });
      return {height: ops.length * row + 6, points};
    },
  });
}
// What passes the roof was set against one that leaves out what the op used: there is no number then.
const roofShare = (p) => (isNumber(p) ? percent(p / 100) : 'unknown');
const opLines = (o, total) => o.rest ? [['time', time(o.seconds)], ['share', percent(ratio(o.seconds, total))]] : [
  ['time', time(o.seconds)], ['share', percent(ratio(o.seconds, total))], ['calls', count(o.calls)],
  ['a call', time(ratio(o.seconds, o.calls))], ['achieved', flopRate(ratio(o.flops, o.seconds) * 1e-9)],
  ['moved', scaled(ratio(o.bytes, o.seconds), 'B/s')], ['of the roof', roofShare(o.percent_of_roof)]];

// What kind of work an op is: colour and shape of its mark.
const kinds = ['attention', 'products', 'rows', 'indexer', 'whole layer'];
function kindOf(op) {
  if (/^(attend|merge)/.test(op)) return 0;
  if (/^(index_|hadamard|select_topk|map_indices)/.test(op)) return 3;
  if (/^layer$/.test(op)) return 4;
  if (/^(project|query$|query_|output$|kv_|absorb|value_up|q_)/.test(op) && !/rope/.test(op)) return 1;
  return 2;
}

/* points: {name, op, kind, intensity, gflops, lines, label, peers: [{name, gflops}]} */
function roofline(title, points, roof, note) {
  const drawn = points.filter((p) => p.intensity > 0 && p.gflops > 0), left_out = points.filter((p) => !drawn.includes(p));
  const roofs = [{name: 'f32', gflops: roof.fma_gflops}, {name: 'bf16', gflops: roof.bf16_gflops}].filter((r) => r.gflops > 0);
  const peers = drawn.some((p) => p.peers.length);
  const legend = kinds.map((name, i) => ({name, series: i, shape: i})).filter((k) => drawn.some((p) => p.kind === k.series));
  if (peers) legend.push({name: 'peer', hollow: true});
  const figure = chart({
    title, nearest: 'xy', wide: true, legend,
    description: `Achieved FLOP/s over arithmetic intensity, both logarithmic, below the measured roof: read ${short(roof.read_gbps)} GB/s` +
      roofs.map((r) => `, ${r.name} ${flopRate(r.gflops)}`).join('') + '.',
    draw(svg, width) {
      const height = Math.max(300, Math.min(430, width * 0.5)), left = 62, right = 14, above = 22, bottom = height - 36;
      const log = Math.log10, all = drawn.flatMap((p) => [p.gflops, ...p.peers.map((q) => q.gflops)]);
      const peak = Math.max(...roofs.map((r) => r.gflops), 1e-9), ridge = peak / (roof.read_gbps || 1);
      const xs = [...drawn.map((p) => p.intensity), ridge];
      const x0 = log(Math.min(...xs)) - 0.25, x1 = log(Math.max(...xs)) + 0.35;
      const y0 = log(Math.min(...all, peak)) - 0.25, y1 = log(Math.max(...all, peak)) + 0.25;
      const x = (v) => left + (log(v) - x0) / (x1 - x0) * (width - left - right);
      const y = (v) => bottom - (log(v) - y0) / (y1 - y0) * (bottom - above);
      const every = (a, b, room) => {
        const step = Math.max(1, Math.ceil((b - a) / room)), out = [];
        for (let e = Math.ceil(a); e <= b; e += step) out.push(10 ** e);
        return out;
      };
      for (const t of every(y0, y1, 8)) {
        add(svg, sv('path', {class: 'gridline', d: `M${left} ${y(t)}H${width - right}`}));
        add(svg, text(left - 6, y(t) + 4, 'end', scaled(t * 1e9, '').replace(/\.0+(?=\D|$)/, '')));
      }
      for (const t of every(x0, x1, width / 50)) {
        add(svg, sv('path', {class: 'gridline', d: `M${x(t)} ${above}V${bottom}`}));
        add(svg, text(x(t), bottom + 16, 'middle', t >= 1 ? count(t) : String(+t.toPrecision(1))));
      }
      add(svg, sv('path', {class: 'axis', style: 'fill:none', d: `M${left} ${above}V${bottom}H${width - right}`}));
      add(svg, text(2, 11, 'start', 'achieved, FLOP/s'));
      add(svg, text(width - right, height - 5, 'end', 'arithmetic intensity, FLOP per byte'));
      const taken = [];  // boxes of labels and marks
      const free = (b) => b[0] >= left && b[2] <= width - 2 && b[1] >= above - 12 && b[3] <= bottom &&
        taken.every((t) => b[2] < t[0] || b[0] > t[2] || b[3] < t[1] || b[1] > t[3]);
      // The roof.
      const slope = {style: 'fill:none;stroke:var(--ink);stroke-width:1.4;stroke-linejoin:round', class: 'roof'};
      const start = Math.max(10 ** x0, 10 ** y0 / roof.read_gbps);
      add(svg, sv('path', {...slope, d: `M${x(start)} ${y(start * roof.read_gbps)}L${x(ridge)} ${y(peak)}H${width - right}`}));
      const names = [];  // of the roof's lines, above the marks
      for (const r of roofs) {
        const from = x(Math.max(10 ** x0, r.gflops / roof.read_gbps));
        if (r.gflops < peak) add(svg, sv('path', {...slope, d: `M${from} ${y(r.gflops)}H${width - right}`, 'stroke-dasharray': '5 3'}));
        const content = `${r.name} ${flopRate(r.gflops)}`, begin = width - right - 6.4 * content.length;
        const clears = (at) => !drawn.some((p) => x(p.intensity) > begin - 5 && y(p.gflops) > at - 14 && y(p.gflops) < at + 6);
        const over = y(r.gflops) - 5, under = y(r.gflops) + 13;
        const crowded = roofs.some((s) => s.gflops > r.gflops && y(r.gflops) - y(s.gflops) < 16);  // the line above is as near
        const at = !crowded && (clears(over) || !clears(under)) ? over : under;
        names.push(text(width - right - 2, at, 'end', content, {class: 'strong halo'}));
        taken.push([begin, at - 10, width, at + 2]);
      }
      const bx = Math.sqrt(start * Math.min(ridge, 10 ** x1)), angle = Math.atan2(y(bx * 10 * roof.read_gbps) - y(bx * roof.read_gbps), x(bx * 10) - x(bx)) * 180 / Math.PI;
      names.push(sv('text', {class: 'strong halo', 'text-anchor': 'middle', transform: `translate(${x(bx) - 4} ${y(bx * roof.read_gbps) - 6}) rotate(${angle})`},
        `read ${short(roof.read_gbps)} GB/s`));
      for (let i = 0; i < 60; ++i) {  // labels keep off the lines too
        const t = 10 ** (x0 + (x1 - x0) * i / 59), lx = x(t), ly = y(Math.min(peak, t * roof.read_gbps));
        taken.push([lx - 4, ly - 3, lx + 4, ly + 3]);
        for (const f of roofs) if (t * roof.read_gbps > f.gflops) taken.push([lx - 8, y(f.gflops) - 2, lx + 8, y(f.gflops) + 2]);
      }
      const r = drawn.length > 40 ? 3.6 : 4.6;
      for (const p of drawn) {
        const px = x(p.intensity), py = y(p.gflops);
        taken.push([px - r, py - r, px + r, py + r]);
        for (const q of p.peers) {
          add(svg, sv('path', {d: `M${px} ${py}V${y(q.gflops)}`, style: 'stroke:var(--soft);stroke-width:1'}));
          add(svg, sv('path', {class: 'peer', d: shapes[0](px, y(q.gflops), r), style: 'fill:var(--card);stroke:var(--ink);stroke-width:1.3'}));
        }
      }
      for (const p of drawn)
        add(svg, sv('path', {class: 'mark', d: shapes[p.kind](x(p.intensity), y(p.gflops), r), style: `fill:${color(p.kind)};stroke:var(--card);stroke-width:.8`}));
      for (const p of drawn) {
        if (!p.label) continue;
        const px = x(p.intensity), py = y(p.gflops), w = 6.1 * p.label.length;
        for (const [tx, ty, anchor] of [[px + 8, py + 4, 'start'], [px - 8, py + 4, 'end'], [px, py - 9, 'middle'], [px, py + 16, 'middle'],
                                        [px + 8, py - 8, 'start'], [px + 8, py + 15, 'start'], [px - 8, py - 8, 'end'], [px - 8, py + 15, 'end']]) {
          const a = anchor === 'start' ? tx : anchor === 'end' ? tx - w : tx - w / 2, box = [a, ty - 9, a + w, ty + 2];
          if (!free(box)) continue;
          taken.push(box);
          add(svg, text(tx, ty, anchor, p.label, {class: 'halo'}));
          break;
        }
      }
      add(svg, names);
      return {height, points: drawn.map((p) => ({x: x(p.intensity), y: y(p.gflops), title: p.name, lines: p.lines}))};
    },
  });
  const notes = [];
  const ops = [...new Set(left_out.map((p) => p.op))];
  if (ops.length) notes.push(`Without arithmetic that is counted, so not in this chart: ${ops.join(', ')}.`);
  if (note) notes.unshift(note);
  for (const n of notes) add(figure, el('p', {class: 'soft'}, n));
  return figure;
}

// ---- Tables

// columns: {name, text: left-aligned}; cells: text, or an Element. The first cell heads its row.
function tableOf(caption, {columns, rows}, attributes) {
  const cell = (c, i) => (i === 0 ? el('th', {scope: 'row'}, c) : el('td', {class: columns[i].text ? 'text' : c && c.bad ? 'bad' : ''}, c && c.bad ? c.bad : c));
  return el('div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption},
    el('table', attributes, el('thead', {}, el('tr', {}, columns.map((c, i) => el('th', {scope: 'col', class: i === 0 || c.text ? 'text' : ''}, c.name)))),
      el('tbody', {}, rows.map((r) => (r.group ? el('tr', {class: 'group'}, el('th', {scope: 'rowgroup', colspan: columns.length}, r.group))
        : el('tr', {}, r.map(cell)))))));
}
function lazyTable(title, make) {
  const details = el('details', {}, el('summary', {}, 'Table'));
  details.firstChild.setAttribute('aria-label', 'Table of ' + title);
  details.build = () => { if (details.children.length === 1) add(details, tableOf(title, make())); };
  details.addEventListener('toggle', () => details.open && details.build());
  return details;
}
function card(title, body, classes) {
  return el('section', {class: 'card ' + (classes || '')}, el('div', {class: 'head'}, el('h3', {}, title)), body);
}
function facts(title, pairs) {
  return card(title, el('div', {class: 'scroll'}, el('table', {}, el('tbody', {},
    pairs.filter((p) => p && p[1] !== undefined && p[1] !== '').map(([k, v]) => el('tr', {}, el('th', {scope: 'row'}, k), el('td', {class: 'value'}, v)))))));
}
function bar(share, label) {
  const fill = el('i', {});
  fill.style.width = Math.max(0, Math.min(100, 100 * share)) + '%';
  return el('span', {}, label, el('span', {class: 'bar', 'aria-hidden': 'true'}, fill));
}
function figures(list) {
  return el('dl', {class: 'figures'}, list.filter(Boolean).map(([name, value, unit, note]) =>
    el('div', {}, el('dt', {}, name), el('dd', {}, value, unit && el('small', {}, ' ' + unit)), note && el('div', {class: 'note'}, note))));
}

// ---- Pages

const main = document.getElementById('content');
const section = (title, ...cards) => add(main, [el('h2', {}, title), el('div', {class: 'grid'}, cards)]);
const columns = (title, ...cards) => add(main, [el('h2', {}, title), el('div', {class: 'columns'}, cards)]);
const notice = (content, bad) => add(main, el('p', {class: 'notice' + (bad ? ' bad' : ''), role: 'note'}, content));
function head(title, subtitle) {
  document.title = title;
  document.querySelector('h1').textContent = title;
  document.getElementById('subtitle').textContent = subtitle;
}
const words = (key) => key.replace(/_s$/, ', s').replace(/_/g, ' ');
const plain = (v) => (v === null ? '–' : typeof v === 'boolean' ? (v ? 'yes' : 'no') : Array.isArray(v) ? v.map(plain).join(', ') || 'all'
  : isNumber(v) ? (Number.isInteger(v) ? (Math.abs(v) < 10000 ? String(v) : count(v)) : short(v)) : String(v));
const figure = (v, unit) => (isNumber(v) ? short(v) + ' ' + unit : '–');
// What repeats it.
const madeBy = [data.version && ['libmla', data.version + (data.commit ? ', commit ' + data.commit : '')], data.command_line && ['command', data.command_line]].filter(Boolean);
const date = data.date ? String(data.date).replace('T', ' ').replace('Z', ' UTC') : '';

function runPage() {
  const {model, machine, options, trace, cache, prefix, throughput, latency_seconds: latency, ops, seconds} = data;
  const s = data.steps_series, n = s.start_s.length, gpu = machine.device !== 'cpu';
  const ran = `${count(model.layers)} of ${things(model.all_layers, 'layer')}`;
  const scale = trace.scale_lengths < 1 ? `lengths × ${short(trace.scale_lengths)}` : '';
  head(['mla run · ' + model.name, ran, scale].filter(Boolean).join(', '),
    [gpu ? machine.device : `${machine.cpu}, ${threads(machine.threads)}`, trace.source, date].filter(Boolean).join(' · '));
  notice(`Times are attention's alone, of ${ran}${scale && ' and ' + scale}: no embedding, MLP, experts or sampling.`);
  if (data.interrupted) notice('The run was interrupted: this covers it up to then.');
  const v = data.verification;
  if (trace.requests > 0 && trace.refused === trace.requests)
    notice(`Every request was refused: the smallest needs ${things(trace.refused_pages, 'page')}, the cache has ${count(cache.pages)}.`, true);
  if (v && v.interrupted) notice('Verification was interrupted: it covers the rows up to then.');
  if (v && (v.failed > 0 || (v.rows === 0 && !v.interrupted)))
    notice(v.rows === 0 ? 'No row was verified.' : `${count(v.failed)} of ${count(v.rows)} verified rows are above their bound. The worst: ${v.worst}.`, true);

  const waits = (name, l) => {
    const [value, unit] = (l.count ? time(l.p50) : '–').split(' ');
    return [name, value, unit || '', l.count ? `p99 ${time(l.p99)}` : 'none'];
  };
  add(main, figures([
    ['Layers', count(model.layers), `of ${count(model.all_layers)}`, ['attention alone', scale].filter(Boolean).join(', ')],
    ['Output', rate(throughput.output_tokens_per_second), 'tokens/s', `${things(throughput.output_tokens, 'token')} over ${time(throughput.duration_s)}`],
    ['Prompt', rate(throughput.prompt_tokens_per_second), 'tokens/s', `${things(throughput.prefill_tokens, 'token')} computed`],
    ['Requests', rate(throughput.requests_per_second), 'a second', `${count(trace.finished)} finished`],
    waits('Step, p50', latency.step),
    waits('TTFT, p50', latency.ttft),
    waits('TPOT, p50', latency.tpot),
    ['Cache, peak', percent(ratio(cache.peak_pages, cache.pages)), '', `mean ${percent(ratio(cache.mean_pages, cache.pages))}`],
    ['Prefix hits', percent(prefix.hit_rate), '', `${count(prefix.hit_tokens)} of ${count(prefix.prompt_tokens)} tokens`],
    v && ['Verified', count(v.rows), v.rows === 1 ? 'row' : 'rows', v.failed ? `${count(v.failed)} FAILED` : `worst: ${percent(ratio(v.worst_error, v.worst_bound), 0)} of bound`],
  ]));

  const number = [];  // of each bucket's first step, from 1
  s.steps.reduce((at, k, i) => (number[i] = at, at + k), 1);
  const steps = (i) => (s.steps[i] === 1 ? `step ${count(number[i])}` : `steps ${count(number[i])}–${count(number[i] + s.steps[i] - 1)}`);
  const when = (i) => `${fixed(s.start_s[i], s.end_s[n - 1] > 100 ? 1 : 3)} s, ${steps(i)}`;
  const each = (f) => s.start_s.map((_, i) => f(i));
  const over = {from: s.start_s, to: s.end_s, xUnit: 'simulated time, s', xName: 'from, steps', heading: when};
  const byStep = {from: number.map((x) => x - 1), to: number.map((x, i) => x - 1 + s.steps[i]), xUnit: 'step', xName: 'steps',
                  heading: (i) => steps(i).replace(/^s/, 'S')};
  const merged = s.steps[0] > 1 ? ` ${count(s.steps[0])} steps are summed up in each bar or point.` : '';
  let prompt = 0, hit = 0;
  const hits = each((i) => (prompt += s.prompt_tokens[i], hit += s.hit_tokens[i], 100 * ratio(hit, prompt)));
  let done = 0;
  const finished = each((i) => (done += s.finished[i]));
  const perStep = (column) => each((i) => ratio(column[i], s.steps[i]));

  section('Over time',
    seriesChart({...over, title: 'Throughput', yUnit: 'tokens/s', description: 'Tokens computed a second of simulated time.' + merged, series: [
      {name: 'prefill', series: 0, values: each((i) => ratio(s.prefill_tokens[i], s.end_s[i] - s.start_s[i])), format: short},
      {name: 'decode', series: 1, values: each((i) => ratio(s.decode_tokens[i], s.end_s[i] - s.start_s[i])), format: short}],
      extra: (i) => [['requests finished', `${count(finished[i])} of ${count(trace.requests)}`]]}),
    seriesChart({...over, title: 'Step latency', yUnit: 'ms', description: 'Measured time of a step.' + merged, series: s.steps[0] > 1 ? [
      {name: 'longest', series: 0, opacity: 0.38, values: s.step_max_s.map((x) => 1e3 * x), format: short},
      {name: 'median', series: 1, line: true, values: s.step_median_s.map((x) => 1e3 * x), format: short}] : [
      {name: 'step', series: 0, values: s.step_max_s.map((x) => 1e3 * x), format: short}],
      extra: (i) => [['prefill tokens', count(s.prefill_tokens[i])], ['decode tokens', count(s.decode_tokens[i])]]}),
    seriesChart({...over, title: 'Cache occupancy and prefix hits', yUnit: '%', yTop: 100, description: 'Pages in use, and prompt tokens found in the cache out of all looked up so far.', series: [
      {name: 'pages in use', series: 0, opacity: 0.45, values: s.pages.map((p) => 100 * ratio(p, cache.pages)), format: (x) => fixed(x, 1) + ' %'},
      {name: 'prefix hit rate so far', series: 1, line: true, values: hits, format: (x) => fixed(x, 1) + ' %'}],
      extra: (i) => [['pages', `${count(s.pages[i])} of ${count(cache.pages)}`], ['hit here', `${count(s.hit_tokens[i])} of ${count(s.prompt_tokens[i])} tokens`]]}),
    seriesChart({...byStep, title: 'New tokens per step', yUnit: 'tokens', description: 'Tokens that a step computes: of prompts, and of requests that generate.' + merged, series: [
      {name: 'prefill', series: 0, values: perStep(s.prefill_tokens), format: short},
      {name: 'decode', series: 1, values: perStep(s.decode_tokens), format: short}],
      extra: (i) => [['requests a step', short(ratio(s.requests[i], s.steps[i]))]]}),
    seriesChart({...byStep, wide: true, title: 'Context per step', yUnit: 'tokens', description: 'Tokens already cached of the requests in a step: what its new tokens attend to besides each other.' + merged, series: [
      {name: 'context', series: 2, values: perStep(s.context_tokens), format: short}],
      extra: (i) => [['requests a step', short(ratio(s.requests[i], s.steps[i]))]]}));

  // A GPU's ops are sampled one by one, which may take longer than the steps that they stand for.
  const inOps = sum(ops.map((o) => o.seconds)), total = Math.max(seconds.steps, inOps);
  const all = inOps < seconds.steps ? [...ops, {op: 'plan and rest', seconds: seconds.steps - inOps, rest: true}] : ops;
  const spent = timeColumn(all.map((o) => o.seconds));
  const sampled = gpu ? `Sampled: one layer of ${count(data.profiled_steps)} of ${count(data.steps)} steps, op by op, scaled to all: ` +
    `${percent(ratio(inOps, seconds.steps), 0)} of the steps' own time.` : '';
  const gflops = ops.map((o) => ratio(o.flops, o.seconds) * 1e-9), gbps = ops.map((o) => ratio(o.bytes, o.seconds) * 1e-9);
  const [perSecond, by] = Math.max(...gflops, 0) >= 1e4 ? ['TFLOP/s', 1e-3] : ['GFLOP/s', 1], gbDigits = Math.max(...gbps, 0) >= 1000 ? 0 : 1;
  section('Ops against the machine',
    opBars(all, total),
    card('Ops', [tableOf('Ops', {
      columns: [{name: 'op'}, {name: 'time, ' + spent.unit}, {name: 'share'}, {name: '% of roof'}, {name: 'calls'}, {name: perSecond}, {name: 'GB/s'}, {name: 'FLOP/byte'}],
      rows: all.map((o, i) => (o.rest ? [o.op, spent.of(o.seconds), percent(ratio(o.seconds, total)), '–', '–', '–', '–', '–']
        : [o.op, spent.of(o.seconds), percent(ratio(o.seconds, total)), roofShare(o.percent_of_roof), count(o.calls),
           fixed(gflops[i] * by, 1), fixed(gbps[i], gbDigits), o.flops > 0 ? short(ratio(o.flops, o.bytes)) : '–'])),
    }), sampled && el('p', {class: 'soft'}, sampled)], 'tall'),
    roofline('Roofline of ops', ops.map((o) => ({
      name: o.op, op: o.op, label: o.op, kind: kindOf(o.op), intensity: ratio(o.flops, o.bytes), gflops: ratio(o.flops, o.seconds) * 1e-9, peers: [],
      lines: () => [...opLines(o, total), ['intensity', short(ratio(o.flops, o.bytes)) + ' FLOP/byte']]})), machine,
      'Above the roof: the op used units, or memory near the core, that the roof was not measured on. What part of its own roof it reached is unknown.'));

  const waited = timeColumn([latency.step.p99, latency.ttft.p99, latency.tpot.p99]);
  const row = (name, l) => [name, count(l.count), ...[l.p50, l.p90, l.p99].map((v) => (l.count ? waited.of(v) : '–'))];
  columns('Summary',
    card('Latency', tableOf('Latency', {
      columns: [{name: ''}, {name: 'count'}, ...['p50', 'p90', 'p99'].map((p) => ({name: `${p}, ${waited.unit}`}))],
      rows: [row('step', latency.step), row('first token (TTFT)', latency.ttft), row('each further token (TPOT)', latency.tpot)]})),
    facts('Throughput', [['output', figure(throughput.output_tokens_per_second, 'tokens/s')], ['prompt', figure(throughput.prompt_tokens_per_second, 'tokens/s')],
      ['together', figure(throughput.total_tokens_per_second, 'tokens/s')], ['requests', figure(throughput.requests_per_second, 'a second')],
      ['over', `${time(throughput.duration_s)}, from the first arrival to the last step's end, simulated`],
      ['generated', things(throughput.output_tokens, 'token')], ['prompt computed', things(throughput.prefill_tokens, 'token')],
      ['while steps ran', figure(throughput.computed_tokens_per_step_second, 'computed tokens/s')]]),
    facts('Run', [['date', date], ['trace', trace.source], ['trace format', trace.format],
      ['requests', `${count(trace.finished)} of ${count(trace.requests)} finished, ${count(trace.refused)} refused`],
      ['preemptions', count(data.preemptions)], ['steps', count(data.steps)], v && ['verification', time(v.seconds)], ['setup', time(seconds.setup)], ['replay', time(seconds.replay)],
      ['simulated', time(seconds.simulated)], ['peak memory', bytes(data.memory.peak_bytes)], ['workspace', bytes(data.memory.workspace_bytes)],
      ...madeBy]),
    facts('Machine', [['device', gpu ? machine.device : 'CPU'], ['processor', machine.cpu], ['threads', count(machine.threads)],
      [gpu ? 'memory copy' : 'memory read', short(machine.read_gbps) + ' GB/s'], ['f32 peak', flopRate(machine.fma_gflops)],
      ['bf16 peak', machine.bf16_gflops > 0 ? flopRate(machine.bf16_gflops) : 'none']]),
    facts('Model and cache', [['model', model.name], ['layers run', ran], ['heads', count(model.heads)],
      ['weights', `${model.weights}, ${bytes(model.weight_bytes)}`], ['absorption', model.absorption], ['up weights', model.up_weights],
      ['cache format', cache.format], ['cache', `${count(cache.pages)} pages of ${count(cache.page_size)} tokens, ${bytes(cache.bytes)}`],
      cache.index_bytes > 0 && ['index cache', bytes(cache.index_bytes)], ['evictions', count(cache.evictions)]]),
    options.topk > 0 && options.sparse !== 'dense' && facts('Sparse attention', [['topk', count(options.topk)],
      ['rows that selected', `${count(data.sparse.selected_rows)} of ${count(data.sparse.selected_rows + data.sparse.unscored_rows)}`],
      ['keys they attended to', `${count(data.sparse.selected_keys)} of ${count(data.sparse.seen_keys)} that they see`]]),
    facts('Options', Object.entries(options).map(([k, x]) => [words(k), plain(x)])));
}

function benchPage() {
  const {machine, roof, options, rows} = data;
  head('mla bench', [`${machine.cpu}, ${threads(options.threads)}, ${machine.target}`, things(rows.length, 'row'), date].filter(Boolean).join(' · '));
  if (data.interrupted) notice('The bench was interrupted: it has the rows up to then.');
  const failed = rows.filter((r) => !r.ok);
  if (failed.length) notice(`${failed.length} of ${rows.length} rows have an error above their bound: ${failed.map((r) => r.name).join('; ')}.`, true);
  const counted = rows.filter((r) => r.of_roof > 0).map((r) => r.of_roof).sort((a, b) => a - b);
  const peered = rows.filter((r) => r.peers && r.peers.length);
  const faster = peered.filter((r) => r.peers.every((p) => p.us * 1e-6 > r.median_s)).length;
  add(main, figures([
    ['Rows', count(rows.length), '', failed.length ? `${failed.length} FAILED` : 'all verified'],
    counted.length && ['Of roof, median row', percent(counted[counted.length >> 1]), '', `from ${percent(counted[0], 0)} to ${percent(counted[counted.length - 1], 0)}`],
    peered.length && ['Faster than all peers', `${faster} of ${peered.length}`, 'rows'],
    ['Memory read', short(roof.read_gbps), 'GB/s'], ['f32 peak', short(roof.fma_gflops), 'GFLOP/s'],
    roof.bf16_gflops > 0 && ['bf16 peak', short(roof.bf16_gflops), 'GFLOP/s'],
  ]));
  const lines = (r) => () => [['median', time(r.median_s)], ['p90', time(r.p90_s)], r.of_roof > 0 && ['of the roof', percent(r.of_roof)],
    r.flops > 0 && ['achieved', flopRate(r.flops / r.median_s * 1e-9)], r.bytes > 0 && ['moved', scaled(r.bytes / r.median_s, 'B/s')],
    r.flops > 0 && r.bytes > 0 && ['intensity', short(r.flops / r.bytes) + ' FLOP/byte'],
    ...(r.peers || []).map((p) => [p.peer, `${time(p.us * 1e-6)}, ${fixed(p.us * 1e-6 / r.median_s, 2)} × ours`])].filter(Boolean);
  section('Rows against the machine', roofline('Roofline of rows', rows.map((r) => ({
    name: r.name, op: r.op, label: rows.length <= 12 ? r.name : '', kind: kindOf(r.op), intensity: ratio(r.flops, r.bytes), gflops: ratio(r.flops, r.median_s) * 1e-9,
    lines: lines(r), peers: (r.peers || []).map((p) => ({name: p.peer, gflops: ratio(r.flops, p.us * 1e-6) * 1e-9}))})), roof,
    'The roof is as measured at the start; rows are judged by what was probed around their rounds. Above it: the row used units, or memory near the core, that the roof was not measured on; its part of the roof is unknown.'));
  const small = (v) => (!isNumber(v) ? '–' : v === 0 ? '0' : v.toExponential(1));
  const body = [];
  let group = null;
  for (const r of rows) {
    if (r.op !== group) body.push({group: group = r.op});
    const cells = [r.name, fixed(1e6 * r.median_s, 2), r.of_roof > 0 ? bar(r.of_roof, percent(r.of_roof)) : r.of_roof === null ? 'unknown' : '–', fixed(1e6 * r.p90_s, 2),
      r.flops > 0 ? fixed(r.flops / r.median_s * 1e-9, 1) : '–', r.bytes > 0 ? fixed(r.bytes / r.median_s * 1e-9, 1) : '–',
      small(r.error), r.ok ? small(r.bound) : {bad: `FAILED, above ${small(r.bound)}`}];
    if (peered.length) cells.push(r.peers ? el('span', {}, r.peers.map((p) => el('span', {class: 'peer'}, `${p.peer}: ${fixed(p.us, 2)}, ${fixed(p.us * 1e-6 / r.median_s, 2)} ×`))) : '–');
    body.push(cells);
  }
  section('Rows', card('All rows', tableOf('All rows', {
    columns: [{name: 'row'}, {name: 'median, µs'}, {name: '% of roof'}, {name: 'p90, µs'}, {name: 'GFLOP/s'}, {name: 'GB/s'}, {name: 'error'}, {name: 'bound'},
      ...(peered.length ? [{name: 'peers, µs and times ours'}] : [])],
    rows: body}, {class: 'long'}), 'wide long'));
  columns('Made with',
    facts('Machine', [['processor', machine.cpu], ['cores', count(machine.cores)], ['memory', bytes(machine.memory_bytes)], ['target', machine.target],
      ['memory read', short(roof.read_gbps) + ' GB/s'], ['f32 peak', flopRate(roof.fma_gflops)], ['bf16 peak', roof.bf16_gflops > 0 ? flopRate(roof.bf16_gflops) : 'none']]),
    facts('Options', [...Object.entries(options).map(([k, x]) => [words(k), plain(x)]), ['date', date], ...madeBy]));
}

if (data.command === 'run') runPage();
else benchPage();

const draw = (width) => { for (const f of document.querySelectorAll('figure')) f.render(width(f)); };
draw(() => 0);
// Paper is narrower than most windows: text in the charts is to stay as large as the text around them.
addEventListener('beforeprint', () => draw((f) => f.printWidth));
addEventListener('afterprint', () => draw(() => 0));

// ---- With #selftest the page checks itself and writes the verdict into <html data-selftest>, for tests in a browser

function selftest() {
  const bad = [...errors], expect = (ok, what) => { if (!ok) bad.push(what); };
  const fits = () => document.documentElement.scrollWidth <= document.documentElement.clientWidth;
  expect(fits(), `wider than the window: ${document.documentElement.scrollWidth} > ${document.documentElement.clientWidth}`);
  // This page has two scripts, and the data makes no elements.
  expect(document.scripts.length === 2, `${document.scripts.length} scripts`);
  expect(!document.querySelector('img, iframe, object, link:not([rel="icon"])'), 'foreign elements');
  const drawn = [...document.querySelectorAll('.plot')];
  for (const plot of drawn) {
    const svg = plot.querySelector('svg'), name = svg ? svg.dataset.chart : plot.parentNode.id;
    expect(svg && svg.querySelector('title').textContent && svg.querySelector('desc').textContent, name + ': no svg with title and description');
    if (!svg) continue;
    const marks = [...svg.querySelectorAll('.mark')].filter((m) => { const b = m.getBBox(); return b.width > 0 || b.height > 0; });
    expect(marks.length > 0, name + ': no marks');
    const outer = svg.getBoundingClientRect();
    expect([...svg.querySelectorAll('text, .mark')].every((t) => { const b = t.getBoundingClientRect(); return b.left > outer.left - 2 && b.right < outer.right + 2; }), name + ': something is cut off');
    expect(!/NaN|Infinity|undefined/.test(svg.outerHTML), name + ': not a number');
    svg.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}));
    expect(!tip.hidden && tip.textContent.length > 3, name + ': no tooltip by key');
    svg.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}));
    expect(tip.hidden, name + ': tooltip stays');
  }
  for (const d of document.querySelectorAll('details')) {
    d.open = true;
    d.build();
    expect(d.querySelector('tbody tr'), 'an empty table');
  }
  expect(fits(), 'wider than the window with its tables open');
  expect(!/NaN|undefined|\[object/.test(main.innerText), 'a value without a number');
  const paper = () => getComputedStyle(document.body).backgroundColor, before = paper();
  document.getElementById('theme').click();
  expect(paper() !== before, 'the theme does not change');
  document.getElementById('theme').click();
  document.documentElement.dataset.charts = drawn.length;
  document.documentElement.dataset.width = document.documentElement.clientWidth;
  document.documentElement.dataset.selftest = [...bad, ...errors.filter((e) => !bad.includes(e))].join('; ') || 'ok';
}
if (location.hash === '#selftest') addEventListener('load', () => {
  draw(() => 0);
  selftest();
  // In a frame, as a test of narrow screens has it: browsers' windows do not get as narrow as a phone.
  if (parent !== window) parent.postMessage({...document.documentElement.dataset}, '*');
});
