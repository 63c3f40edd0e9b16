// The choice of a token, and the step's end.
#ifdef KERNEL_argmax
// One block. Ties go to the lowest id; one logit that is not finite makes the gap NaN.
BODY {
  __shared__ float best[1024], second[1024];
  __shared__ int at[1024], bad[1024];
  const int t = threadIdx.x;
  const logits_t* row = logits + start;
  float b = -INFINITE, b2 = -INFINITE;
  int where = width, wrong = 0;
  for (int i = t; i < width; i += blockDim.x) {
    const float v = (float)row[i];
    wrong |= !finite(v);
    if (v > b || where == width) { b2 = b; b = v; where = i; } else if (v > b2) b2 = v;
  }
  best[t] = b; second[t] = b2; at[t] = where; bad[t] = wrong;
  __syncthreads();
  for (int m = blockDim.x / 2; m; m >>= 1) {
    if (t < m) {
      const int u = t + m;
      const bool other = best[u] > best[t] || (best[u] == best[t] && at[u] < at[t]);
      const float loser = other ? best[t] : best[u], rest = other ? second[u] : second[t];
      if (other) { best[t] = best[u]; at[t] = at[u]; }
      second[t] = fmaxf(loser, rest);
      bad[t] |= bad[u];
    }
    __syncthreads();
  }
  if (t) return;
  ids[0] = at[0];
  gap[0] = bad[0] ? NOT_A_NUMBER : fminf(best[0] - second[0], LARGEST);
}
#else
BODY {
  if (threadIdx.x == 0) *length += P_rows;
}
#endif
