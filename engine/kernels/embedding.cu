// Rows of a table by token id; the grid's second dimension is the row of y. Ids were checked before they came here.
BODY {
  const i64 i = element(), id = ids[blockIdx.y];
  if (i >= width) return;
#ifdef KERNEL_gather_rows
  y[blockIdx.y * width + i] = (float)table[id * width + i];
#else
  const int blocks = (int)((width + P_block - 1) / P_block), b = (int)(i / P_block);
#if P_packed
  const float v = (float)code((const unsigned char*)table + id * ((width * P_bits + 7) / 8), i, P_bits);
  float zero = (float)(1 << (P_bits - 1));
#ifdef HAS_zero_points
  zero = (float)code((const unsigned char*)zero_points + id * ((blocks * P_bits + 7) / 8), b, P_bits);
#endif
#else
  const float v = (float)table[id * width + i];
  float zero = 0;
#ifdef HAS_zero_points
  zero = (float)zero_points[id * blocks + b];
#endif
#endif
  y[blockIdx.y * width + i] = (v - zero) * (float)scales[id * blocks + b];
#endif
}
