// Reductions: a warp a line of `depth` elements; lane L takes every 32nd, and lanes are joined in one fixed tree.
#define LINE                                                                            \
  const i64 line = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;              \
  const int lane = threadIdx.x % 32;                                                    \
  if (line >= count) return;

typedef Wide<a_t>::type wide_t;
// A total order: numbers before what is none, lower index first among equals.
__device__ bool before(wide_t v, i64 i, wide_t w, i64 j, bool largest) {
  if (is_nan(v) || is_nan(w)) return is_nan(v) != is_nan(w) ? is_nan(w) : i < j;
  if (v != w) return largest ? v > w : v < w;
  return i < j;
}

#if defined REDUCE
typedef Sum<wide_t>::type sum_t;
template <class T> __device__ T root(T x) { return (T)sqrt((double)x); }
template <> __device__ float root(float x) { return sqrtf(x); }
// NumPy's: a number that is none wins.
__device__ sum_t larger(sum_t a, sum_t b) { return is_nan(a) || a > b ? a : b; }
__device__ sum_t smaller(sum_t a, sum_t b) { return is_nan(a) || a < b ? a : b; }
__device__ sum_t add(sum_t a, sum_t b) { return a + b; }
__device__ sum_t multiply(sum_t a, sum_t b) { return a * b; }
BODY {
  LINE
  const a_t* at = a + offset(line, shape, steps, 0);
  sum_t made = 0;
  bool any = false;
  for (i64 k = lane; k < depth; k += 32) {
    const sum_t v = (sum_t)(wide_t)at[offset(k, deep, deep_steps, 0)], x = TERM;
    made = any ? REDUCE(made, x) : x;
    any = true;
  }
  for (int m = 16; m; m >>= 1) {
    const sum_t other = __shfl_xor_sync(0xffffffffu, made, m);
    const bool there = __shfl_xor_sync(0xffffffffu, (int)any, m);
    // The lower lane's part comes first on both sides, so that all lanes hold one number.
    const sum_t low = lane & m ? other : made, high = lane & m ? made : other;
    made = there && any ? REDUCE(low, high) : there ? other : made;
    any |= there;
  }
  if (!any) made = EMPTY;
  if (lane == 0) { const sum_t x = made; y[line] = stored<y_t>(LAST); }
}
#elif defined KERNEL_softmax
BODY {
  LINE
  const i64 at = line / inner * inner * depth + line % inner;
  wide_t top = -INFINITE;
  for (i64 k = lane; k < depth; k += 32) { const wide_t v = a[at + k * inner]; top = is_nan(v) || v > top ? v : top; }
  for (int m = 16; m; m >>= 1) {
    const wide_t o = __shfl_xor_sync(0xffffffffu, top, m);
    top = is_nan(o) || o > top ? o : top;
  }
  wide_t sum = 0;
  for (i64 k = lane; k < depth; k += 32) sum += exp((wide_t)a[at + k * inner] - top);
  sum = warp_sum(sum);
  for (i64 k = lane; k < depth; k += 32) {
    const wide_t shifted = (wide_t)a[at + k * inner] - top;
#if P_log
    y[at + k * inner] = stored<y_t>(shifted - log(sum));
#else
    y[at + k * inner] = stored<y_t>(exp(shifted) / sum);
#endif
  }
}
#elif defined KERNEL_lp_norm
BODY {
  LINE
  const i64 at = line / inner * inner * depth + line % inner;
  wide_t sum = 0;
  for (i64 k = lane; k < depth; k += 32) {
    const wide_t v = a[at + k * inner];
    sum += P_p == 1 ? (v < 0 ? -v : v) : v * v;
  }
  sum = warp_sum(sum);
  const wide_t norm = P_p == 1 ? sum : sqrt(sum);
  for (i64 k = lane; k < depth; k += 32)
    y[at + k * inner] = stored<y_t>(norm != 0 ? (wide_t)a[at + k * inner] / norm : (wide_t)0);
}
#elif defined KERNEL_arg
// The first that is no number wins, as in NumPy; else the best, ties to the first or to the last.
BODY {
  LINE
  const i64 at = line / inner * inner * depth + line % inner;
  i64 best = -1;
  wide_t held = 0;
  for (i64 n = 0; n < depth; ++n) {  // every lane walks the whole line: lines of this kernel are short
    const i64 k = P_last ? depth - 1 - n : n;
    const wide_t v = a[at + k * inner];
    const bool better = is_nan(v) ? !is_nan(held) : !is_nan(held) && (P_smallest ? v < held : v > held);
    if (best < 0 || better) { best = k; held = v; }
  }
  if (lane == 0) y[line] = best;
}
#else
// topk: one choice after another, each the best of what comes after the one before.
BODY {
  LINE
  const i64 at = line / inner * inner * depth + line % inner, to = line / inner * inner * P_k + line % inner;
  wide_t last = 0;
  i64 taken = -1;
  for (int n = 0; n < P_k; ++n) {
    wide_t held = 0;
    i64 best = -1;
    for (i64 k = lane; k < depth; k += 32) {
      const wide_t v = a[at + k * inner];
      if (taken >= 0 && !before(last, taken, v, k, P_largest)) continue;
      if (best < 0 || before(v, k, held, best, P_largest)) { best = k; held = v; }
    }
    for (int m = 16; m; m >>= 1) {
      const wide_t v = __shfl_xor_sync(0xffffffffu, held, m);
      const i64 k = __shfl_xor_sync(0xffffffffu, best, m);
      if (k >= 0 && (best < 0 || before(v, k, held, best, P_largest))) { best = k; held = v; }
    }
    last = held;
    taken = best;
    if (lane == 0) { y[to + n * inner] = a[at + best * inner]; y1[to + n * inner] = best; }
  }
}
#endif
