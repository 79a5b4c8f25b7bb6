// What AddressSanitizer does unless ASAN_OPTIONS says otherwise: each input frees little, so that a short quarantine
// holds all of it and memory stays in the caches; of allocations two calls of their stacks are kept.
extern "C" const char* __asan_default_options() { return "quarantine_size_mb=16:malloc_context_size=2"; }
