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

BODY {
  extern __shared__ float shared[];
  float *in = shared, *hidden = in + HIDDEN, *total = hidden + ROWS;
  __shared__ int chosen[P_k];
  __shared__ float share[P_k];
  const i64 token = blockIdx.x;
  const int t = threadIdx.x, warp = t / 32, warps = blockDim.x / 32, lane = t % 32;
  for (int i = t; i < HIDDEN; i += blockDim.x) { in[i] = (float)x[token * HIDDEN + i]; total[i] = 0; }
  if (t == 0) {
    const router_t* logits = router + token * EXPERTS;
    float sum = 0, top = -INFINITE;
    for (int e = 0; e < EXPERTS; ++e) { const float v = (float)logits[e]; if (is_nan(v) || v > top) top = v; }
    for (int n = 0; n < P_k; ++n) {
      int best = -1;
      for (int e = 0; e < EXPERTS; ++e) {
        const float v = (float)logits[e];
        if (n) {
          const float last = (float)logits[chosen[n - 1]];
          if (v > last || (v == last && e <= chosen[n - 1])) continue;
        }
        if (best < 0 || v > (float)logits[best]) best = e;
      }
      chosen[n] = best < 0 ? 0 : best;
      share[n] = expf((float)logits[chosen[n]] - top);
    }
#if P_normalise
    for (int n = 0; n < P_k; ++n) sum += share[n];
#else
    for (int e = 0; e < EXPERTS; ++e) sum += expf((float)logits[e] - top);
#endif
    for (int n = 0; n < P_k; ++n) {
      share[n] /= sum;
#ifdef HAS_routed
      routed[token * P_k + n] = chosen[n];
#endif
    }
  }
  __syncthreads();
  for (int n = 0; n < P_k; ++n) {
    const i64 e = chosen[n];
    for (int row = warp; row < ROWS; row += warps) {
      float v = row_product(fc1, SCALES(fc1), POINTS1, e * ROWS + row, HIDDEN, in);
#ifdef HAS_fc1_bias
      v += (float)fc1_bias[e * ROWS + row];
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
      float v = row_product(fc2, SCALES(fc2), POINTS2, e * HIDDEN + row, INNER, hidden);
#ifdef HAS_fc2_bias
      v += (float)fc2_bias[e * HIDDEN + row];
#endif
      if (lane == 0) total[row] += share[n] * v;
    }
    __syncthreads();
  }
  for (int i = t; i < HIDDEN; i += blockDim.x) y[token * HIDDEN + i] = total[i];
}
