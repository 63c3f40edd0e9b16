// Rows of x (the grid's second dimension) times a weight, each in one fixed order of sums.
#if P_transposed
// The weight lies as [N, K]: a warp an output.
BODY {
  inputs_ready();
  const int lane = threadIdx.x % 32;
  const i64 n = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (n >= P_N) return;
  const x_t* row = x + (i64)blockIdx.y * P_K;
  float sum = 0;
  for (int k = lane; k < P_K; k += 32) sum += (float)row[k] * (float)weight[n * P_K + k];
  sum = warp_sum(sum);
  if (lane == 0) y[(i64)blockIdx.y * P_N + n] = sum;
}
#elif defined KERNEL_matmul_qdq
// 32 outputs a block; eight warps take rows of the weight in turns, and their sums are added in order.
__device__ int at_code(const codes_t* codes, i64 i) {
#if defined P_type_int4
  return (code((const unsigned char*)codes, i, 4) ^ 8) - 8;
#elif defined P_type_uint4
  return code((const unsigned char*)codes, i, 4);
#else
  return codes[i];
#endif
}
__device__ float weight_at(i64 k, i64 n, SIGNATURE) {
  const i64 block = k / P_block * P_N + n;
  float v = (float)at_code(codes, k * P_N + n);
#ifdef HAS_zero_points
  v -= (float)at_code(zero_points, block);
#endif
  return v * (float)scales[block];
}
BODY {
  inputs_ready();
  __shared__ float parts[8][32];
  const int lane = threadIdx.x % 32, slice = threadIdx.x / 32;
  const i64 n = (i64)blockIdx.x * 32 + lane;
  const x_t* row = x + (i64)blockIdx.y * P_K;
  float sum = 0;
  if (n < P_N) for (int k = slice; k < P_K; k += 8) sum += (float)row[k] * weight_at(k, n, PASSED);
  parts[slice][lane] = sum;
  __syncthreads();
  if (slice || n >= P_N) return;
  float total = 0;
  for (int s = 0; s < 8; ++s) total += parts[s][lane];
  y[(i64)blockIdx.y * P_N + n] = total;
}
#else
// The weight lies as [K, N]: eight columns a block, of this weight or of one that takes the same x. A thread takes every
// THREADS-th row, asking for what it can before x is there. x may be normed first.
#define COLUMNS 8
#define GROUPS_OF(n) (((n) + COLUMNS - 1) / COLUMNS)
union Row {
  weight_t at[COLUMNS];
#ifdef WHOLE_ROWS
  uint4 words[COLUMNS * sizeof(weight_t) / 16];
#endif
  __device__ Row() {}
  __device__ void load(const weight_t* from, int left) {
#ifdef WHOLE_ROWS
#pragma unroll
    for (int w = 0; w < sizeof(words) / 16; ++w) words[w] = ((const uint4*)from)[w];
#else
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) at[c] = from[c < left ? c : 0];
#endif
  }
};
#define PICK(n, start) { own = weight##n; to = y##n + (i64)blockIdx.y * P_N##n; width = P_N##n; group -= start; }
BODY {
  constexpr int EACH = (P_K + THREADS - 1) / THREADS, AT_ONCE = EACH < 8 ? EACH : 8, WARPS = THREADS / 32;
  __shared__ float parts[WARPS][COLUMNS], squares[WARPS];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  int group = blockIdx.x, width = P_N;
  const weight_t* own = weight;
  y_t* to = y + (i64)blockIdx.y * P_N;
#ifdef P_N3
  if (group >= GROUPS_OF(P_N) + GROUPS_OF(P_N2)) PICK(3, GROUPS_OF(P_N) + GROUPS_OF(P_N2)) else
#endif
#ifdef P_N2
  if (group >= GROUPS_OF(P_N)) PICK(2, GROUPS_OF(P_N))
#endif
  const int first = group * COLUMNS, left = width - first;
  Row held[AT_ONCE];
#pragma unroll
  for (int j = 0; j < AT_ONCE; ++j)
    if (t + j * THREADS < P_K) held[j].load(own + (i64)(t + j * THREADS) * width + first, left);
  inputs_ready();
  const x_t* row = x + (i64)blockIdx.y * P_K;
  float sums[COLUMNS] = {}, square = 0;
#pragma unroll 1
  for (int start = 0; start < EACH; start += AT_ONCE) {
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int k = t + (start + j) * THREADS;
      if (k >= P_K) continue;
      float v = (float)row[k];
#ifdef HAS_gamma
      square += v * v;
      v *= (float)gamma[k];
#endif
      if (start) held[j].load(own + (i64)k * width + first, left);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) sums[c] += v * (float)held[j].at[c];
    }
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const float made = warp_sum(sums[c]);
    if (lane == 0) parts[warp][c] = made;
  }
#ifdef HAS_gamma
  square = warp_sum(square);
  if (lane == 0) squares[warp] = square;
#endif
  __syncthreads();
  if (t >= COLUMNS || t >= left) return;
  float total = 0, scale = 1;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) total += parts[w][t];
#ifdef HAS_gamma
  float mean = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) mean += squares[w];
  mean /= P_K;
  // Squares that overflow would give zeros, and zeros give logits that look like numbers: let it show.
  scale = finite(mean) ? 1.0f / sqrtf(mean + P_eps) : NOT_A_NUMBER;
#endif
  to[first + t] = total * scale;
}
#endif
