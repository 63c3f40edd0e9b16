// Moves that steps alone do not describe: an axis between `outer` and `inner` elements. Thread i makes element i of y.
#if defined KERNEL_concat
// The part that holds index k of the axis: `ends` are the parts' ends.
BODY {
  const i64 i = element();
  if (i >= count) return;
  const y_t* const parts[] = {READ};
  const i64 r = i % inner, k = i / inner % extent, o = i / inner / extent;
  int p = 0;
  while (k >= ends[p]) ++p;
  const i64 first = p ? ends[p - 1] : 0;
  y[i] = parts[p][(o * (ends[p] - first) + k - first) * inner + r];
}
#elif defined KERNEL_split
BODY {
  const i64 i = element();
  if (i >= count) return;
  y_t* const parts[] = {WRITTEN};
  const i64 r = i % inner, k = i / inner % extent, o = i / inner / extent;
  int p = 0;
  while (k >= ends[p]) ++p;
  const i64 first = p ? ends[p - 1] : 0;
  parts[p][(o * (ends[p] - first) + k - first) * inner + r] = a[i];
}
#elif defined KERNEL_scatter_elements
// Every element of y looks through the indices of its line in order, so that what comes last counts last.
BODY {
  const i64 i = element();
  if (i >= count) return;
  WIDE(y_t) v = a[i];
  const i64 k = i / steps[P_axis] % shape[P_axis];
  i64 line = 0, rest = i;
  bool inside = true;
  for (int d = RANK - 1; d >= 0; --d) {
    const i64 at = rest % shape[d];
    rest /= shape[d];
    if (d == P_axis) continue;
    inside &= at < b_shape[d];
    line += at * b_steps[d];
  }
  if (inside) for (i64 j = 0; j < b_shape[P_axis]; ++j) {
    const i64 e = line + j * b_steps[P_axis], given = b[e], index = given < 0 ? given + shape[P_axis] : given;
    if (index < 0 || index >= shape[P_axis]) { report(fault, step, given, shape[P_axis]); continue; }
    if (index != k) continue;
    const WIDE(y_t) u = c[e];
#if defined P_reduction_add
    v += u;
#elif defined P_reduction_mul
    v *= u;
#elif defined P_reduction_max
    v = is_nan(v) || v > u ? v : u;
#elif defined P_reduction_min
    v = is_nan(v) || v < u ? v : u;
#else
    v = u;
#endif
  }
  y[i] = stored<y_t>(v);
}
#elif defined KERNEL_trilu
BODY {
  const i64 i = element();
  if (i >= count) return;
  const i64 column = i % columns, row = i / columns % rows;
  const bool kept = P_upper ? column >= row + P_k : column <= row + P_k;
  y[i] = kept ? a[i] : (y_t)0;
}
#else
// gather: indices stand in place of the axis; gather_elements: one index an element, in the shape of y.
BODY {
  const i64 i = element();
  if (i >= count) return;
#ifdef KERNEL_gather
  const i64 r = i % inner, o = i / inner / picks, given = b[i / inner % picks];
  const i64 before = o * extent * inner + r;
#else
  i64 before = 0, rest = i;
  for (int d = RANK - 1; d >= 0; --d) {
    if (d != P_axis) before += rest % b_shape[d] * steps[d];
    rest /= b_shape[d];
  }
  const i64 given = b[i];
#endif
  const i64 index = given < 0 ? given + extent : given;
  if (index < 0 || index >= extent) { report(fault, step, given, extent); return; }
  y[i] = a[before + index * inner];
}
#endif
