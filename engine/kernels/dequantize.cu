// y = (a - c) * b: one scale, one an index of the axis, or one a block of P_block indices.
BODY {
  const i64 i = element();
  if (i >= count) return;
#if ONE_SCALE
  const i64 at = 0;
#elif P_block
  const i64 k = i / inner % extent, blocks = (extent + P_block - 1) / P_block;
  const i64 at = (i / inner / extent * blocks + k / P_block) * inner + i % inner;
#else
  const i64 at = i / inner % extent;
#endif
  double v = (double)(WIDE(a_t))a[i];
#ifdef HAS_c
  v -= (double)(WIDE(c_t))c[at];
#endif
  y[i] = stored<y_t>((WIDE(b_t))v * (WIDE(b_t))b[at]);
}
