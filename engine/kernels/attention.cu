// Grouped-query attention, a block for a query head (x) of a new row (y): rotary, the cache's write, and the sums over
// the cached positions in tiles of 256 with a running maximum. What this launch adds to the cache is computed from its
// inputs wherever it is read, rounded as it is stored, so that no block waits for another and chunks cannot be felt.
#define TILE 256
#define WARPS 8
#define GROUP (P_heads / P_kv_heads)

// x normed by `gamma` where there is one; every lane of a warp calls it with the same vector.
template <class G> __device__ float inverse_rms(const query_t* x, const G* gamma) {
#ifdef HAS_q_norm
  float part = 0;
  for (int i = threadIdx.x % 32; i < P_head_size; i += 32) part += (float)x[i] * (float)x[i];
  return __fdiv_rn(1.0f, __fsqrt_rn(warp_sum(part) / P_head_size + P_qk_norm_eps));
#else
  return 1.0f;
#endif
}
#ifdef HAS_q_norm
#define NORMED(x, i, inverse, gamma) __fmul_rn(__fmul_rn((float)(x)[i], inverse), (float)(gamma)[i])
#define Q_GAMMA q_norm
#define K_GAMMA k_norm
#else
#define NORMED(x, i, inverse, gamma) ((float)(x)[i])
#define Q_GAMMA query
#define K_GAMMA query
#endif

// Element i of a normed and turned vector at position `at`.
template <class G, class T> __device__ float turned(
    const query_t* x, const G* gamma, float inverse, const T* cos, const T* sin, i64 at, int i) {
  const float own = NORMED(x, i, inverse, gamma);
#ifdef HAS_cos
  if (i >= 2 * HALF) return own;
  const int j = P_interleaved ? i / 2 : i % HALF, lo = P_interleaved ? 2 * j : j, hi = P_interleaved ? lo + 1 : j + HALF;
  const float a = NORMED(x, lo, inverse, gamma), b = NORMED(x, hi, inverse, gamma);
  const float c = (float)cos[at * HALF + j], s = (float)sin[at * HALF + j];
  return i == lo ? __fmaf_rn(a, c, -__fmul_rn(b, s)) : __fmaf_rn(a, s, __fmul_rn(b, c));
#else
  return own;
#endif
}

// A number as the cache holds it, and what a reader makes of that; `scale` is an int8 cache's.
__device__ k_cache_t to_cache(float v, float scale) {
#ifdef HAS_k_scale
  return (k_cache_t)fminf(fmaxf(rintf(__fdiv_rn(v, scale)), -128.0f), 127.0f);
#else
  return (k_cache_t)v;
#endif
}
__device__ float from_cache(k_cache_t v, float scale) {
#ifdef HAS_k_scale
  return __fmul_rn((float)v, scale);
#else
  return (float)v;
#endif
}
// A new number as the rows of this launch see it: no code says "not finite", so let it show.
__device__ float seen_new(float v, float scale) {
#ifdef HAS_k_scale
  if (!finite(v)) return NOT_A_NUMBER;
#endif
  return from_cache(to_cache(v, scale), scale);
}

BODY {
  constexpr int D = P_head_size;
  __shared__ float q[D], score[TILE], mixed[TILE];
  const int h = blockIdx.x, r = blockIdx.y, kh = h / GROUP, t = threadIdx.x, lane = t % 32, warp = t / 32;
  const i64 past = *length, pos = past + r, end = pos + 1;
  const i64 start = P_window > 0 && end > P_window ? end - P_window : 0;
#ifdef HAS_key
  const i64 key_row = P_kv_heads * D, width = P_heads * D;
  const query_t *new_keys = key + kh * D, *new_values = value + kh * D;
#else
  const i64 width = (P_heads + 2 * P_kv_heads) * D, key_row = width;
  const query_t *new_keys = query + (P_heads + kh) * D, *new_values = query + (P_heads + P_kv_heads + kh) * D;
#endif
#if defined HAS_cos_long
  const bool far = past + gridDim.y + *ahead > P_long_above;
  const cos_t *c = far ? cos_long : cos, *s = far ? sin_long : sin;
#elif defined HAS_cos
  const cos_t *c = cos, *s = sin;
#else
  const float *c = 0, *s = 0;
#endif
#ifdef HAS_k_scale
#define SCALE(which, i) ((float)which[ONE_##which ? 0 : kh * D + (i)])
#else
#define SCALE(which, i) 1.0f
#endif
  {  // every warp holds what it needs to norm, so that no barrier is missed
    const query_t* own = query + r * width + h * D;
    const float inverse = inverse_rms(own, Q_GAMMA);
    for (int i = t; i < D; i += blockDim.x) q[i] = turned(own, Q_GAMMA, inverse, c, s, pos, i);
    if (h % GROUP == 0) {
      const query_t *k = new_keys + r * key_row, *v = new_values + r * key_row;
      const float k_inverse = inverse_rms(k, K_GAMMA);
      for (int i = t; i < D; i += blockDim.x) {
        const i64 at = pos * k_cache_position + kh * k_cache_head + i;
        k_cache[at] = to_cache(turned(k, K_GAMMA, k_inverse, c, s, pos, i), SCALE(k_scale, i));
        v_cache[pos * v_cache_position + kh * v_cache_head + i] = to_cache((float)v[i], SCALE(v_scale, i));
      }
    }
  }
  constexpr int SPAN = D <= 32 ? 32 : D <= 64 ? 64 : D <= 128 ? 128 : 256;  // threads that share the elements of y
  constexpr int EACH = (D + SPAN - 1) / SPAN, SHARES = TILE / SPAN;
  const int mine = t % SPAN, share = t / SPAN;
  float acc[EACH] = {}, top = -INFINITE, total = 0;
#ifdef HAS_sinks
  top = (float)sinks[h];
  total = 1.0f;
#endif
  __syncthreads();
  for (i64 first = start; first < end; first += TILE) {
    const int held = (int)(end - first < TILE ? end - first : TILE);
    for (int n = warp; n < held; n += WARPS) {
      const i64 p = first + n;
      float dot = 0;
      if (p < past) {
        const k_cache_t* k = k_cache + p * k_cache_position + kh * k_cache_head;
        for (int i = lane; i < D; i += 32) dot = __fmaf_rn(q[i], from_cache(k[i], SCALE(k_scale, i)), dot);
      } else {
        const query_t* k = new_keys + (p - past) * key_row;
        const float inverse = inverse_rms(k, K_GAMMA);
        for (int i = lane; i < D; i += 32)
          dot = __fmaf_rn(q[i], seen_new(turned(k, K_GAMMA, inverse, c, s, p, i), SCALE(k_scale, i)), dot);
      }
      dot = warp_sum(dot) * P_scale;
#ifdef SOFTCAP
      dot = P_softcap * tanhf(dot / P_softcap);
#endif
      if (lane == 0) score[n] = dot;
    }
    __syncthreads();
    const float own = t < held ? score[t] : -INFINITE, high = fmaxf(block_max(own), top);
    const float shrink = top == -INFINITE ? 0.0f : expf(top - high);
    const float e = t < held ? expf(own - high) : 0.0f;
    total = total * shrink + block_sum(e);
    top = high;
    score[t] = e;
    __syncthreads();
    for (int j = 0; j < EACH; ++j) {
      const int i = mine + j * SPAN;
      acc[j] *= shrink;
      if (i < D) for (int n = share; n < held; n += SHARES) {
        const i64 p = first + n;
        const float v = p < past ? from_cache(v_cache[p * v_cache_position + kh * v_cache_head + i], SCALE(v_scale, i))
                                 : seen_new((float)new_values[(p - past) * key_row + i], SCALE(v_scale, i));
        acc[j] = __fmaf_rn(score[n], v, acc[j]);
      }
    }
    __syncthreads();
  }
  for (int j = 0; j < EACH; ++j) {
    mixed[t] = acc[j];
    __syncthreads();
    const int i = mine + j * SPAN;
    if (share == 0 && i < D) {
      float sum = 0;
      for (int n = 0; n < SHARES; ++n) sum += mixed[n * SPAN + mine];
      y[((i64)r * P_heads + h) * D + i] = sum / total;
    }
    __syncthreads();
  }
}
