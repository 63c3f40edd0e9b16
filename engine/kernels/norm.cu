// Norms over the last `width` elements, a block a row. X, GAMMA, BETA and Y are the operands' names in each form.
__device__ float value(const X_t* x, i64 i) { return (float)x[i]; }

__device__ float mean_square(const X_t* x, int width) {
  float part = 0;
  for (int i = threadIdx.x; i < width; i += blockDim.x) { float v = value(x, i); part += v * v; }
  return block_sum(part) / width;
}
// Squares that overflow would give zeros, and zeros give logits that look like numbers: let it show.
__device__ float rms_scale(float mean) { return finite(mean) ? 1.0f / sqrtf(mean + P_eps) : NOT_A_NUMBER; }

#if defined KERNEL_skip_rms_norm || defined KERNEL_skip_layer_norm
#define RESIDUAL                                                                                       \
  for (int i = threadIdx.x; i < width; i += blockDim.x)                                                \
    sum[at + i] = (float)x[at + i] + (float)skip[at + i] IF_BIAS(+(float)bias[i]);                     \
  __syncthreads();
#ifdef HAS_bias
#define IF_BIAS(term) term
#else
#define IF_BIAS(term)
#endif
#else
#define RESIDUAL
#endif

#if defined KERNEL_skip_layer_norm || defined KERNEL_layer_norm
BODY {
  const i64 at = (i64)blockIdx.x * width;
  RESIDUAL
  float part = 0;
  for (int i = threadIdx.x; i < width; i += blockDim.x) part += value(X + at, i);
  const float mean = block_sum(part) / width;
  part = 0;
  for (int i = threadIdx.x; i < width; i += blockDim.x) { float d = value(X + at, i) - mean; part += d * d; }
  const float inverse = 1.0f / sqrtf(block_sum(part) / width + P_eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    float made = (value(X + at, i) - mean) * inverse * (float)GAMMA[i];
#ifdef BETA
    made += (float)BETA[i];
#endif
    y[at + i] = made;
  }
  if (threadIdx.x) return;
#ifdef HAS_y1
  y1[blockIdx.x] = mean;
#endif
#ifdef HAS_y2
  y2[blockIdx.x] = inverse;
#endif
}
#else
BODY {
  const i64 at = (i64)blockIdx.x * width;
  RESIDUAL
  const float scale = rms_scale(mean_square(X + at, width));
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    float made = value(X + at, i) * scale * (float)GAMMA[i];
#ifdef GATE
    const float gate = (float)GATE[at + i];
    made *= gate * sigmoid(gate);
#endif
    y[at + i] = made;
  }
}
#endif
