// Before nbits.cu: a mixture's two products, of a token's chosen experts alone. UP is a row of the grid for each of them:
// it routes, and leaves the share times what the activation made. DOWN is one product over all of them, side by side.
// Experts lie in one bank each after the other, or APART, each where `experts` says.
#define MIXTURE
#if defined UP
#define SIDE(part) fc1##part
#if defined HAS_fc1_zero_points
#define HAS_zero_points 1
typedef fc1_zero_points_t zero_points_t;
#endif
typedef fc1_scales_t scales_t;
typedef hidden_t out_t;
#define X_ROW (x + (i64)(blockIdx.y / P_k) * P_K)
#else
#define SIDE(part) fc2##part
#if defined HAS_fc2_zero_points
#define HAS_zero_points 1
typedef fc2_zero_points_t zero_points_t;
#endif
typedef fc2_scales_t scales_t;
typedef y_t out_t;
#define X_ROW (hidden + (i64)blockIdx.y * P_K)
#define TURNS_EACH ((ROW_K + 127) / 128)
#undef HAS_gamma  // it is UP's
#endif

__shared__ float shares[P_k];

#if defined UP
// One warp: the experts of a row of blocks, which another step chose where they lie apart.
__device__ void pick(const float (&own)[LOGITS_A_LANE], SIGNATURE) {
#ifdef APART
  if (threadIdx.x < P_k) chosen[threadIdx.x] = routed[(i64)(blockIdx.y / P_k) * P_k + threadIdx.x];
#else
  choose(own);
#endif
}
__device__ void share_out(const float (&own)[LOGITS_A_LANE], const router_t* logits) {
  const int lane = threadIdx.x;
  bool any_nan = false;
  float top = -INFINITE;
#pragma unroll
  for (int i = 0; i < LOGITS_A_LANE; ++i)
    if (lane + 32 * i < EXPERTS) { any_nan |= is_nan(own[i]); top = fmaxf(top, own[i]); }
  for (int m = 16; m; m >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, m));
  if (__any_sync(0xffffffffu, any_nan)) top = NOT_A_NUMBER;
  const float raised = lane < P_k ? expf((float)logits[chosen[lane]] - top) : 0.0f;
  float sum = 0;
#if P_normalise
  for (int n = 0; n < P_k; ++n) sum += __shfl_sync(0xffffffffu, raised, n);
#else
#pragma unroll
  for (int i = 0; i < LOGITS_A_LANE; ++i) if (lane + 32 * i < EXPERTS) sum += expf(own[i] - top);
  sum = warp_sum(sum);
#endif
  if (lane < P_k) shares[lane] = raised / sum;
}
// The shares, which nobody needs before the sums are there; and what the first of a row of blocks leaves behind.
__device__ void settle(const float (&own)[LOGITS_A_LANE], SIGNATURE) {
  const int t = threadIdx.x;
  if (t < 32) {
    share_out(own, router + (i64)(blockIdx.y / P_k) * EXPERTS);
    __syncwarp();
    if (t == 0 && blockIdx.x == 0) {
#ifndef APART
      routed[blockIdx.y] = chosen[blockIdx.y % P_k];
#endif
      share[blockIdx.y] = shares[blockIdx.y % P_k];
    }
  }
  if (blockIdx.x == 0)
    for (int i = P_N + t; i < PADDED; i += blockDim.x) hidden[(i64)blockIdx.y * PADDED + i] = 0;
}
#define OWN chosen[blockIdx.y % P_k]
#ifdef APART
#define EXPERT OWN
#define EXPERTS_BEFORE 0
#else
#define EXPERTS_BEFORE OWN
#endif
// Row of an expert's first product that is half `half` of pair `row`.
__device__ int row_of_pair(int row, int half) {
#if P_gated
  return EXPERTS_BEFORE * 2 * P_N + (P_fusion == 1 ? 2 * row + half : row + half * P_N);
#else
  return EXPERTS_BEFORE * P_N + row;
#endif
}
#if P_gated && P_fusion == 1
#define ROW_STEP 2
#endif
#if defined HAS_fc1_bias
#define UP_BIAS(row, half) (float)fc1_bias[row_of_pair(row, half)]
#else
#define UP_BIAS(row, half) 0.0f
#endif
__device__ float activated(float gate, float value) {
#if defined P_activation_swiglu
#ifdef P_limit
  gate = is_nan(gate) || gate < P_limit ? gate : P_limit;
  value = is_nan(value) ? value : fminf(fmaxf(value, -P_limit), P_limit);
#endif
  return gate * sigmoid(P_alpha * gate) * (value + P_beta);
#elif defined P_activation_silu
  return gate * sigmoid(gate);
#elif defined P_activation_gelu
  return gelu_tanh(gate);
#elif defined P_activation_relu
  return is_nan(gate) || gate > 0 ? gate : 0.0f;
#else
  return gate;
#endif
}
#else
#ifdef APART
#define EXPERT chosen[0]
__shared__ i64 beyond[P_k];  // bytes from a token's first expert to each
template <class T> __device__ const T* of_chosen(const T* of_first, int n) {
  return (const T*)((const char*)of_first + beyond[n]);
}
#define FROM(of_first, n) of_chosen(of_first, n)
#define ROWS_BEFORE(n) 0
#else
#define FROM(of_first, n) of_first
#define ROWS_BEFORE(n) ((i64)chosen[n] * P_N)
#endif
__device__ void recall(SIGNATURE) {
  const int t = threadIdx.x;
  if (t < P_k) {
    chosen[t] = routed[(i64)blockIdx.y * P_k + t];
    shares[t] = share[(i64)blockIdx.y * P_k + t];
#ifdef APART
    beyond[t] = experts[chosen[t]] - experts[routed[(i64)blockIdx.y * P_k]];
#endif
  }
  __syncthreads();
}
// What is added to a row of the sum: the experts' biases by their shares, the shared expert by its gate, a residual.
__device__ float added(int row, SIGNATURE) {
  float made = 0;
#ifdef HAS_fc2_bias
  for (int n = 0; n < P_k; ++n) made += shares[n] * (float)FROM(fc2_bias, n)[ROWS_BEFORE(n) + row];
#endif
#ifdef HAS_other
  made += (float)other[(i64)blockIdx.y * P_N + row] * sigmoid((float)other_gate[blockIdx.y]);
#endif
#ifdef HAS_residual
  made += (float)residual[(i64)blockIdx.y * P_N + row];
#endif
  return made;
}
#endif
