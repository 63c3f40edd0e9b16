// Mixture of experts, a block a token: routing in a total order, then each chosen expert's two products in turn.
__device__ float activated(float x) {
#if defined P_activation_silu
  return x * sigmoid(x);
#elif defined P_activation_gelu
  return gelu_tanh(x);  // as every one of onnxruntime's MoE kernels has it
#elif defined P_activation_relu
  return is_nan(x) || x > 0 ? x : 0.0f;
#else
  return x;
#endif
}

// Row n of an expert's product with x; every lane of the warp gets it.
template <class W, class S, class Z> __device__ float row_product(
    const W* w, const S* scales, const Z* points, i64 row, int width, const float* x) {
  const int lane = threadIdx.x % 32;
  float sum = 0;
#if P_bits
  constexpr int BLOCK = P_block;
  const int block = BLOCK ? BLOCK : width, blocks = (width + block - 1) / block;
  const unsigned char* codes = (const unsigned char*)w + row * (width * P_bits / 8);
  for (int i = lane; i < width; i += 32) {
    const int b = i / block;
    float zero = (float)(1 << (P_bits - 1));
    if (points) zero = (float)code((const unsigned char*)points + row * ((blocks * P_bits + 7) / 8), b, P_bits);
    sum += ((float)code(codes, i, P_bits) - zero) * (float)scales[row * blocks + b] * x[i];
  }
#else
  for (int i = lane; i < width; i += 32) sum += (float)w[row * width + i] * x[i];
#endif
  return warp_sum(sum);
}
#if P_bits
#define SCALES(n) n##_scales
#else
#define SCALES(n) (const float*)0
#endif
#ifdef HAS_fc1_zero_points
#define POINTS1 fc1_zero_points
#else
#define POINTS1 (const unsigned char*)0
#endif
#ifdef HAS_fc2_zero_points
#define POINTS2 fc2_zero_points
#else
#define POINTS2 (const unsigned char*)0
#endif
// Rows of the bank before those of expert n of the token, or that expert's own address.
#ifdef APART
#define EXPERT chosen[n]
#define BEFORE(rows) 0
#else
#define BEFORE(rows) ((i64)chosen[n] * (rows))
#endif

BODY {
  extern __shared__ float shared[];
  float *in = shared, *hidden = in + HIDDEN, *total = hidden + ROWS;
  __shared__ float share[P_k];
  const i64 token = blockIdx.x;
  const int t = threadIdx.x, warp = t / 32, warps = blockDim.x / 32, lane = t % 32;
  for (int i = t; i < HIDDEN; i += blockDim.x) { in[i] = (float)x[token * HIDDEN + i]; total[i] = 0; }
  const router_t* logits = router + token * EXPERTS;
  if (warp == 0) {
#ifdef APART
    for (int n = lane; n < P_k; n += 32) chosen[n] = routed[token * P_k + n];
#else
    float own[LOGITS_A_LANE];
    load_logits(logits, own);
    choose(own);
#endif
    __syncwarp();
  }
  if (t == 0) {
    float sum = 0, top = -INFINITE;
    for (int e = 0; e < EXPERTS; ++e) { const float v = (float)logits[e]; if (is_nan(v) || v > top) top = v; }
    for (int n = 0; n < P_k; ++n) share[n] = expf((float)logits[chosen[n]] - top);
#if P_normalise
    for (int n = 0; n < P_k; ++n) sum += share[n];
#else
    for (int e = 0; e < EXPERTS; ++e) sum += expf((float)logits[e] - top);
#endif
    for (int n = 0; n < P_k; ++n) {
      share[n] /= sum;
#if defined HAS_routed && !defined APART
      routed[token * P_k + n] = chosen[n];
#endif
    }
  }
  __syncthreads();
  for (int n = 0; n < P_k; ++n) {
    for (int row = warp; row < ROWS; row += warps) {
      float v = row_product(fc1, SCALES(fc1), POINTS1, BEFORE(ROWS) + row, HIDDEN, in);
#ifdef HAS_fc1_bias
      v += (float)fc1_bias[BEFORE(ROWS) + row];
#endif
      if (lane == 0) hidden[row] = v;
    }
    __syncthreads();
#ifdef P_activation_swiglu
    float made[(INNER + 255) / 256];
    for (int i = t, m = 0; i < INNER; i += blockDim.x, ++m) {
      float gate = hidden[P_fusion == 1 ? 2 * i : i], value = hidden[P_fusion == 1 ? 2 * i + 1 : i + INNER];
#ifdef P_limit
      gate = is_nan(gate) || gate < P_limit ? gate : P_limit;
      value = is_nan(value) ? value : fminf(fmaxf(value, -P_limit), P_limit);
#endif
      made[m] = gate * sigmoid(P_alpha * gate) * (value + P_beta);
    }
    __syncthreads();
    for (int i = t, m = 0; i < INNER; i += blockDim.x, ++m) hidden[i] = made[m];
#else
    for (int i = t; i < INNER; i += blockDim.x) hidden[i] = activated(hidden[i]);
#endif
    __syncthreads();
    for (int row = warp; row < HIDDEN; row += warps) {
      float v = row_product(fc2, SCALES(fc2), POINTS2, BEFORE(HIDDEN) + row, INNER, hidden);
#ifdef HAS_fc2_bias
      v += (float)fc2_bias[BEFORE(HIDDEN) + row];
#endif
      if (lane == 0) total[row] += share[n] * v;
    }
    __syncthreads();
  }
  for (int i = t; i < HIDDEN; i += blockDim.x) y[token * HIDDEN + i] = total[i];
}
