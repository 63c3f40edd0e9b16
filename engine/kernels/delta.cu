// The gated delta rule of a head, a block each, with what stands around it: q and k of length 1, gates, the norm behind.
// The state is [heads, DK, DV]: a thread owns a column's share of DK, and the shares' sums are joined in order.
#define PARTS (THREADS / DV)
#define OWN (DK / PARTS)
#define WIDTH (2 * P_q_heads * DK + P_kv_heads * DV)

// One warp: a vector over its length, zeros for one that has none.
__device__ void unit(const float* from, float factor, float* to) {
  const int lane = threadIdx.x % 32;
  float v[DK / 32], sum = 0;
#pragma unroll
  for (int i = 0; i < DK / 32; ++i) { v[i] = from[lane + 32 * i]; sum += v[i] * v[i]; }
  const float length = sqrtf(warp_sum(sum));
#pragma unroll
  for (int i = 0; i < DK / 32; ++i) to[lane + 32 * i] = length != 0 ? v[i] / length * factor : 0.0f;
}

BODY {
  __shared__ float qs[DK], ks[DK], helds[PARTS][DV], outs[PARTS][DV], squares[DV / 32];
  const int t = threadIdx.x, j = t % DV, part = t / DV, warp = t / 32;
  const int h = blockIdx.x, kh = h / (P_kv_heads / P_q_heads);
  float* own = state + ((i64)h * DK + part * OWN) * DV + j;
  float s[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) s[i] = own[i * DV];
  inputs_ready();
#ifdef HAS_scale
  const float factor = (float)*scale;
#else
  const float factor = 1;
#endif
  for (i64 token = 0; token < tokens; ++token) {
    const float *row = qkv + token * WIDTH, v = row[2 * P_q_heads * DK + h * DV + j];
    const i64 at = token * P_kv_heads + h;
    if (warp == 0) unit(row + kh * DK, factor, qs);
    if (warp == 1) unit(row + (P_q_heads + kh) * DK, 1, ks);
    const float decay = expf((float)c[h] * softplus((float)a[at] + (float)b[h])), write = sigmoid((float)d[at]);
    const float open = (float)gate[at * DV + j];
    __syncthreads();
    float held = 0, out = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) { s[i] *= decay; held += s[i] * ks[part * OWN + i]; }
    helds[part][j] = held;
    __syncthreads();
    held = 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) held += helds[p][j];
    const float u = write * (v - held);
#pragma unroll
    for (int i = 0; i < OWN; ++i) { s[i] += ks[part * OWN + i] * u; out += s[i] * qs[part * OWN + i]; }
    outs[part][j] = out;
    __syncthreads();
    if (part == 0) {
      out = 0;
#pragma unroll
      for (int p = 0; p < PARTS; ++p) out += outs[p][j];
      out *= P_scale;
      const float square = warp_sum(out * out);
      if (t % 32 == 0) squares[warp] = square;
    }
    __syncthreads();
    if (part == 0) {
      float mean = 0;
#pragma unroll
      for (int w = 0; w < DV / 32; ++w) mean += squares[w];
      mean /= DV;
      // Squares that overflow would give zeros, and zeros give logits that look like numbers: let it show.
      const float by = finite(mean) ? 1.0f / sqrtf(mean + P_eps) : NOT_A_NUMBER;
      y[at * DV + j] = out * by * (float)gamma[j] * (open * sigmoid(open));
    }
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i) own[i * DV] = s[i];
}
