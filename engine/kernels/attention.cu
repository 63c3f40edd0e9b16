// Grouped-query attention, a block for a query head (x) of a new row (y): rotary, the cache's write, and the sums over
// the cached positions. LANES lanes share a position, EACH elements a lane, and go from position to position, GROUPS apart,
// with a running maximum; what they find is joined in one fixed order. What this launch adds to the cache is computed from
// its inputs wherever it is read, rounded as it is stored, so that no block waits for another and chunks cannot be felt.
#define D P_head_size
#define GROUP (P_heads / P_kv_heads)
#define GROUPS (THREADS / LANES)
#define WARPS (THREADS / 32)
#define GROUPS_A_WARP (32 / LANES)
#define LOG2E 1.44269504f  // scores are kept as powers of two
#define EVERYONE 0xffffffffu

template <class T> __device__ T lanes_sum(T v) {
  for (int m = LANES / 2; m; m >>= 1) v += __shfl_xor_sync(EVERYONE, v, m);
  return v;
}
// What x is normed with, where it is; lanes that share a position call it with the same vector, all of a warp at once.
template <class G> __device__ float inverse_rms(const query_t* x, const G* gamma) {
#ifdef HAS_q_norm
  float part = 0;
  for (int e = 0, i = threadIdx.x % LANES * EACH; e < EACH; ++e, ++i)
    if (i < D) part = __fmaf_rn((float)x[i], (float)x[i], part);
  return __fdiv_rn(1.0f, __fsqrt_rn(lanes_sum(part) / D + P_qk_norm_eps));
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
  return (k_cache_t)fminf(fmaxf(rintf(__fmul_rn(v, scale == 0 ? 1.0f : __frcp_rn(scale))), -128.0f), 127.0f);
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

// EACH elements of a cache, as they lie.
union Raw {
  k_cache_t at[EACH];
#ifdef WHOLE_WORDS
  u32 words[EACH * sizeof(k_cache_t) / 4];
#endif
  __device__ Raw() {}
  __device__ void load(const k_cache_t* from, int i) {
#ifdef WHOLE_WORDS
    if (i < D) {
      if constexpr (sizeof(words) % 16 == 0) {
#pragma unroll
        for (int n = 0; n < sizeof(words) / 16; ++n) ((uint4*)words)[n] = ((const uint4*)(from + i))[n];
      } else {
#pragma unroll
        for (int n = 0; n < sizeof(words) / 8; ++n) ((uint2*)words)[n] = ((const uint2*)(from + i))[n];
      }
    }
#else
#pragma unroll
    for (int e = 0; e < EACH; ++e) if (i + e < D) at[e] = from[i + e];
#endif
  }
};

BODY {
  __shared__ float q[D], new_key[D], new_value[D], mixed[WARPS][D], tops[WARPS], totals[WARPS];
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
  const int own = t % LANES * EACH;  // the first element of this lane
  const k_cache_t *keys = k_cache + kh * k_cache_head, *values = v_cache + kh * v_cache_head;
  const i64 first = start + t / LANES;
  Raw k, v, next_k, next_v;
  if (first < past) {
    k.load(keys + first * k_cache_position, own);
    v.load(values + first * v_cache_position, own);
  }
  {
    const query_t *mine = query + r * width + h * D, *key_here = new_keys + r * key_row;
    const float inverse = inverse_rms(mine, Q_GAMMA), k_inverse = inverse_rms(key_here, K_GAMMA);
    for (int n = t; n < 3 * D; n += THREADS) {
      const int i = n % D;
      if (n < D) {
        q[i] = turned(mine, Q_GAMMA, inverse, c, s, pos, i);
      } else {
        const bool of_key = n < 2 * D;
        const float made = of_key ? turned(key_here, K_GAMMA, k_inverse, c, s, pos, i) : (float)new_values[r * key_row + i];
        const float scale = of_key ? SCALE(k_scale, i) : SCALE(v_scale, i);
        (of_key ? new_key : new_value)[i] = seen_new(made, scale);
        if (h % GROUP == 0) {
          k_cache_t* to = of_key ? k_cache + pos * k_cache_position + kh * k_cache_head
                                 : v_cache + pos * v_cache_position + kh * v_cache_head;
          to[i] = to_cache(made, scale);
        }
      }
    }
  }
  __syncthreads();
  float of_q[EACH], acc[EACH] = {}, top = -INFINITE, total = 0;
#pragma unroll
  for (int e = 0; e < EACH; ++e) of_q[e] = own + e < D ? q[own + e] : 0;
  // One position more, of the lanes that are `in`; all of a warp come here at once.
  const auto take = [&](bool in, const float (&of_k)[EACH], const float (&of_v)[EACH]) {
    float dot = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) dot = __fmaf_rn(of_q[e], of_k[e], dot);
    dot = lanes_sum(dot) * P_scale;
#ifdef SOFTCAP
    dot = P_softcap * tanhf(dot / P_softcap);
#endif
    dot *= LOG2E;
    if (!in) return;
    const float high = fmaxf(top, dot), shrink = exp2f(top - high), weight = exp2f(dot - high);
    total = __fmaf_rn(total, shrink, weight);
#pragma unroll
    for (int e = 0; e < EACH; ++e) acc[e] = __fmaf_rn(acc[e], shrink, __fmul_rn(weight, of_v[e]));
    top = high;
  };
  float of_k[EACH], of_v[EACH];
  for (i64 from = start + warp * GROUPS_A_WARP; from < past; from += GROUPS) {
    const i64 p = from + lane / LANES, next = p + GROUPS;
    if (next < past) {
      next_k.load(keys + next * k_cache_position, own);
      next_v.load(values + next * v_cache_position, own);
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      of_k[e] = own + e < D ? from_cache(k.at[e], SCALE(k_scale, own + e)) : 0;
      of_v[e] = own + e < D ? from_cache(v.at[e], SCALE(v_scale, own + e)) : 0;
    }
    take(p < past, of_k, of_v);
    k = next_k;
    v = next_v;
  }
  for (i64 p = past > start ? past : start; p < end; ++p) {  // what this launch adds
    const int mine = (int)((p - start) % GROUPS);
    if (mine / GROUPS_A_WARP != warp) continue;
    if (p == pos) {
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        of_k[e] = own + e < D ? new_key[own + e] : 0;
        of_v[e] = own + e < D ? new_value[own + e] : 0;
      }
    } else {
      const query_t *row = new_keys + (p - past) * key_row, *of_row = new_values + (p - past) * key_row;
      const float inverse = inverse_rms(row, K_GAMMA);
      for (int e = 0; e < EACH; ++e) {
        const int i = own + e;
        of_k[e] = i < D ? seen_new(turned(row, K_GAMMA, inverse, c, s, p, i), SCALE(k_scale, i)) : 0;
        of_v[e] = i < D ? seen_new((float)of_row[i], SCALE(v_scale, i)) : 0;
      }
    }
    take(mine % GROUPS_A_WARP == lane / LANES, of_k, of_v);
  }
#define SHARE(of, all) ((of) == -INFINITE ? 0.0f : exp2f((of) - (all)))
  for (int m = LANES; m < 32; m <<= 1) {
    const float other = __shfl_xor_sync(EVERYONE, top, m), high = fmaxf(top, other);
    const float mine = SHARE(top, high), theirs = SHARE(other, high);
    total = total * mine + __shfl_xor_sync(EVERYONE, total, m) * theirs;
#pragma unroll
    for (int e = 0; e < EACH; ++e) acc[e] = acc[e] * mine + __shfl_xor_sync(EVERYONE, acc[e], m) * theirs;
    top = high;
  }
  if (lane < LANES)
#pragma unroll
    for (int e = 0; e < EACH; ++e) if (own + e < D) mixed[warp][own + e] = acc[e];
  if (lane == 0) { tops[warp] = top; totals[warp] = total; }
  __syncthreads();
  float high = -INFINITE;
#ifdef HAS_sinks
  high = (float)sinks[h] * LOG2E;
#endif
  for (int w = 0; w < WARPS; ++w) high = fmaxf(high, tops[w]);
  for (int i = t; i < D; i += THREADS) {
    float sum = 0, all = 0;
#ifdef HAS_sinks
    all = exp2f((float)sinks[h] * LOG2E - high);
#endif
    for (int w = 0; w < WARPS; ++w) {
      const float share = SHARE(tops[w], high);
      sum = __fmaf_rn(share, mixed[w][i], sum);
      all = __fmaf_rn(share, totals[w], all);
    }
    y[((i64)r * P_heads + h) * D + i] = sum / all;
  }
}
