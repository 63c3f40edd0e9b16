// Rows of x (the grid's second dimension) times a weight, each in one fixed order of sums.
#if defined KERNEL_matmul_nbits
// A warp an output; lane L takes words L, L + 32, ... of the codes, each within one block.
#define CODES_A_WORD (32 / P_bits)
#define WORDS_A_BLOCK (P_block / CODES_A_WORD)
#define BLOCKS ((P_K + P_block - 1) / P_block)

__device__ float zero_point(i64 n, int b, SIGNATURE) {
#if !defined HAS_zero_points
  return (float)(1 << (P_bits - 1));
#elif defined POINTS_PACKED
  return (float)code(zero_points + n * ((BLOCKS * P_bits + 7) / 8), b, P_bits);
#else
  return (float)zero_points[n * BLOCKS + b];
#endif
}
// A code as a float without a conversion, which is slow: it is the low end of 2^23's mantissa.
__device__ float code_value(u32 word, int j) {
  return __uint_as_float(0x4b000000u | (word >> (j * P_bits) & ((1u << P_bits) - 1))) - 8388608.0f;
}
BODY {
  const int lane = threadIdx.x % 32;
  const i64 n = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (n >= P_N) return;
  const x_t* row = x + (i64)blockIdx.y * P_K;
  const u32* words = (const u32*)codes + n * (BLOCKS * WORDS_A_BLOCK);
  float sum = 0;
#pragma unroll 4
  for (int w = lane; w < BLOCKS * WORDS_A_BLOCK; w += 32) {
    const u32 word = words[w];
    const int b = w / WORDS_A_BLOCK, k = w * CODES_A_WORD;
    const float zero = zero_point(n, b, PASSED), scale = (float)scales[n * BLOCKS + b];
    float part = 0;
#ifdef X_BY_FOUR
    if (k < P_K)
#pragma unroll
      for (int j = 0; j < CODES_A_WORD; j += 4) {
        const float4 v = *(const float4*)(row + k + j);
        part += (code_value(word, j) - zero) * v.x;
        part += (code_value(word, j + 1) - zero) * v.y;
        part += (code_value(word, j + 2) - zero) * v.z;
        part += (code_value(word, j + 3) - zero) * v.w;
      }
#else
#pragma unroll
    for (int j = 0; j < CODES_A_WORD; ++j)
      if (k + j < P_K) part += (code_value(word, j) - zero) * (float)row[k + j];
#endif
    sum += part * scale;
  }
  sum = warp_sum(sum);
#ifdef HAS_bias
  sum += (float)bias[n];
#endif
  if (lane == 0) y[(i64)blockIdx.y * P_N + n] = sum;
}
#elif P_transposed
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
