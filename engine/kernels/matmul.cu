// Rows of x (the grid's second dimension) times a weight, each in one fixed order of sums.
#if P_transposed
// The weight lies as [N, K]: a warp an output.
BODY {
  const int lane = threadIdx.x % 32;
  const i64 n = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (n >= P_N) return;
  const x_t* row = x + (i64)blockIdx.y * P_K;
  float sum = 0;
  for (int k = lane; k < P_K; k += 32) sum += (float)row[k] * (float)weight[n * P_K + k];
  sum = warp_sum(sum);
  if (lane == 0) y[(i64)blockIdx.y * P_N + n] = sum;
}
#else
// 32 outputs a block; eight warps take rows of the weight in turns, and their sums are added in order.
#if defined KERNEL_matmul_qdq
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
#else
__device__ float weight_at(i64 k, i64 n, SIGNATURE) { return (float)weight[k * P_N + n]; }
#endif
BODY {
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
#endif
