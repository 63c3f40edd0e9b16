// Plain decode kernels of benchmarks/layer_spike.py: right, in one fixed order of sums, float32, and not fast.
// Every kernel runs 256 threads a block (argmax and advance: one block). Caches are [position, kv head, element].
typedef long long i64; typedef unsigned int u32;
#define NAN_OR_INF(v) (!(fabsf(v) <= 3.402823466e38f))
__device__ float warp_sum(float v) { for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m); return v; }
__device__ float block_sum(float v, float* s) {  // eight warps, one fixed tree; every thread gets the sum
  v = warp_sum(v); __syncthreads(); if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v; __syncthreads();
  float t = 0; for (int w = 0; w < 8; ++w) t += s[w]; return t; }
__device__ void norm_row(const float* x, const float* gamma, float* y, float eps, int n, float* s) {
  float part = 0; for (int i = threadIdx.x; i < n; i += 256) part += x[i] * x[i];
  float scale = 1.0f / sqrtf(block_sum(part, s) / n + eps);
  for (int i = threadIdx.x; i < n; i += 256) y[i] = x[i] * scale * gamma[i]; }
extern "C" __global__ void rms_norm(const float* x, const float* gamma, float* y, float eps, int n) {
  __shared__ float s[8]; i64 at = (i64)blockIdx.x * n; norm_row(x + at, gamma, y + at, eps, n, s); }
extern "C" __global__ void skip_rms_norm(const float* x, const float* skip, const float* gamma, const float* bias,
                                         float* y, float* sum, float eps, int n) {
  __shared__ float s[8]; i64 at = (i64)blockIdx.x * n;
  for (int i = threadIdx.x; i < n; i += 256) sum[at + i] = x[at + i] + skip[at + i] + (bias ? bias[i] : 0.0f);
  __syncthreads(); norm_row(sum + at, gamma, y + at, eps, n, s); }
extern "C" __global__ void sigmoid(const float* x, float* y, int n) {
  int i = blockIdx.x * 256 + threadIdx.x; if (i < n) y[i] = 1.0f / (1.0f + expf(-x[i])); }
extern "C" __global__ void mul(const float* x, const float* other, float* y, int n, int period) {
  int i = blockIdx.x * 256 + threadIdx.x; if (i < n) y[i] = x[i] * other[i % period]; }
extern "C" __global__ void gather_block_quantized(const i64* ids, const unsigned char* table, const float* scales,
                                                  float* y, int width, int bits, int block) {
  i64 id = ids[blockIdx.x]; int blocks = (width + block - 1) / block;
  for (int i = threadIdx.x; i < width; i += 256) {
    u32 code = (table[(id * width + i) * bits / 8] >> (i * bits % 8)) & ((1u << bits) - 1);
    y[(i64)blockIdx.x * width + i] = ((float)code - (1 << (bits - 1))) * scales[id * blocks + i / block]; } }
extern "C" __global__ void matmul_nbits(const float* x, const unsigned char* codes, const float* scales,
    const float* zero_points, const float* bias, float* y, int N, int K, int bits, int block) {
  int n = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, blocks = (K + block - 1) / block;
  x += (i64)blockIdx.y * K; float sum = 0;  // a warp a row; lane L sums blocks L, L + 32, ...: 16 bytes a load
  if (n < N) for (int b = lane; b < blocks; b += 32) {
    i64 at = (i64)n * blocks + b; const uint4* packed = (const uint4*)(codes + at * (block * bits / 8));
    float zero = zero_points ? zero_points[at] : (float)(1 << (bits - 1)), part = 0;
    for (int i = 0; i < block * bits / 128; ++i) {
      uint4 v = packed[i]; u32 words[4] = {v.x, v.y, v.z, v.w};
      for (int w = 0; w < 4; ++w) for (int shift = 0; shift < 32; shift += bits) {
        int k = b * block + ((i * 4 + w) * 32 + shift) / bits;
        if (k < K) part += ((float)((words[w] >> shift) & ((1u << bits) - 1)) - zero) * x[k]; } }
    sum += part * scales[at]; }
  sum = warp_sum(sum); if (n < N && lane == 0) y[(i64)blockIdx.y * N + n] = sum + (bias ? bias[n] : 0.0f); }
__device__ float rotated(const float* v, const float* cos, const float* sin, int i, i64 at, int half, int inter) {
  if (!cos || i >= 2 * half) return v[i];
  int j = inter ? i / 2 : i % half; bool first = inter ? i % 2 == 0 : i < half;
  float a = v[inter ? 2 * j : j], b = v[inter ? 2 * j + 1 : j + half], c = cos[at * half + j], s = sin[at * half + j];
  return first ? __fmaf_rn(a, c, -__fmul_rn(b, s)) : __fmaf_rn(a, s, __fmul_rn(b, c)); }
extern "C" __global__ void gqa(const float* query, const float* key, const float* value, float* k_cache, float* v_cache,
    const i64* length, const float* cos, const float* sin, float* y, int heads, int kv_heads, int d, float scale,
    float softcap, int window, int inter, int width, int half) {
  extern __shared__ float shared[]; __shared__ float s[8]; float *q = shared, *score = shared + d;
  int h = blockIdx.x, r = blockIdx.y, kh = h / (heads / kv_heads), stride = key ? kv_heads * d : width;
  if (!key) { key = query + heads * d; value = key + kv_heads * d; }
  i64 past = *length, pos = past + r, end = pos + 1, start = window > 0 && end > window ? end - window : 0;
  for (int i = threadIdx.x; i < d; i += 256) {
    q[i] = rotated(query + (i64)r * width + h * d, cos, sin, i, pos, half, inter);
    if (h % (heads / kv_heads) == 0) {
      k_cache[(pos * kv_heads + kh) * d + i] = rotated(key + (i64)r * stride + kh * d, cos, sin, i, pos, half, inter);
      v_cache[(pos * kv_heads + kh) * d + i] = value[(i64)r * stride + kh * d + i]; } }
  __syncthreads(); float top = -3.402823466e38f;  // rows of this launch come from its inputs: no block waits for another
  for (i64 p = start + threadIdx.x; p < end; p += 256) { float dot = 0;
    for (int i = 0; i < d; ++i) dot += q[i] * (p < past ? k_cache[(p * kv_heads + kh) * d + i]
        : rotated(key + (p - past) * stride + kh * d, cos, sin, i, p, half, inter));
    dot *= scale; score[p - start] = softcap > 0 ? softcap * tanhf(dot / softcap) : dot; }
  __syncthreads(); for (i64 p = 0; p < end - start; ++p) top = fmaxf(top, score[p]);
  float part = 0; __syncthreads();
  for (i64 p = threadIdx.x; p < end - start; p += 256) part += score[p] = expf(score[p] - top);
  float total = block_sum(part, s);
  for (int i = threadIdx.x; i < d; i += 256) { float mixed = 0;
    for (i64 p = start; p < end; ++p) mixed += score[p - start] / total * (p < past
        ? v_cache[(p * kv_heads + kh) * d + i] : value[(p - past) * stride + kh * d + i]);
    y[((i64)r * heads + h) * d + i] = mixed; } }
extern "C" __global__ void argmax(const float* logits, i64* ids, float* gap, int n) {
  __shared__ float best[256], second[256]; __shared__ int at[256], bad[256]; int t = threadIdx.x;
  float b = -3.402823466e38f, b2 = b; int where = n, wrong = 0;
  for (int i = t; i < n; i += 256) { float v = logits[i]; wrong |= NAN_OR_INF(v);
    if (v > b || where == n) { b2 = b; b = v; where = i; } else if (v > b2) b2 = v; }
  best[t] = b; second[t] = b2; at[t] = where; bad[t] = wrong; __syncthreads();
  for (int m = 128; m; m >>= 1) { if (t < m) { int u = t + m;
      bool other = best[u] > best[t] || (best[u] == best[t] && at[u] < at[t]);
      float loser = other ? best[t] : best[u], rest = other ? second[u] : second[t];
      if (other) { best[t] = best[u]; at[t] = at[u]; }
      second[t] = fmaxf(loser, rest); bad[t] |= bad[u]; } __syncthreads(); }
  if (t == 0) { ids[0] = at[0]; gap[0] = bad[0] ? __int_as_float(0x7fffffff) : best[0] - second[0]; } }
extern "C" __global__ void advance(i64* length, int rows) { if (threadIdx.x == 0) *length += rows; }
