// What both forms of grouped-query attention stand on, and the form for long contexts, which go in parts.
#define D P_head_size
#define GROUP (P_heads / P_kv_heads)
#define GROUPS (THREADS / LANES)
#define WARPS (THREADS / 32)
#define GROUPS_A_WARP (32 / LANES)
#define LOG2E 1.44269504f  // scores are kept as powers of two
#define EVERYONE 0xffffffffu
#define SHARE(of, all) ((of) == -INFINITE ? 0.0f : exp2f((of) - (all)))

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

#ifdef HAS_key  // where new keys and values of kv head kh begin, and how far apart rows lie
#define NEW_KEYS (key + kh * D)
#define NEW_VALUES (value + kh * D)
#define KEY_ROW (P_kv_heads * D)
#define QUERY_ROW (P_heads * D)
#else
#define NEW_KEYS (query + (P_heads + kh) * D)
#define NEW_VALUES (query + (P_heads + P_kv_heads + kh) * D)
#define KEY_ROW ((P_heads + 2 * P_kv_heads) * D)
#define QUERY_ROW KEY_ROW
#endif
#ifdef HAS_k_scale
#define SCALE(which, i) ((float)which[ONE_##which ? 0 : kh * D + (i)])
#else
#define SCALE(which, i) 1.0f
#endif
#ifdef HAS_cos
#define TABLE cos_t
#else
#define TABLE float
#endif
// The tables that this launch turns by.
struct Turns { const TABLE *c, *s; };
static __device__ __forceinline__ Turns turns_of(SIGNATURE) {
#if defined HAS_cos_long
  return *length + gridDim.y + *ahead > P_long_above ? Turns{cos_long, sin_long} : Turns{cos, sin};
#elif defined HAS_cos
  return {cos, sin};
#else
  return {0, 0};
#endif
}

__shared__ float q[D], new_key[D], new_value[D], mixed[ROOM], tops[WARPS * HEADS], totals[WARPS * HEADS];

#if SPLITS > 1
// A context in at most SPLITS parts of one length, which follows from how many positions are seen. A block takes a part
// for all query heads of a kv head, so that keys and values are read once: TEAMS teams of warps, HEADS heads each, AT_ONCE
// positions a lane. Parts are joined from the first to the last: by the block that ends last where they are spread over
// the grid, with `parts` as room between, else by the one block that goes through them. The order of sums is one.
#define TEAM (WARPS / TEAMS)
#define TAKEN (GROUPS_A_WARP * AT_ONCE)
#define SLOTS (AT_ONCE * HEAD_SLOTS)
#define SLOT_LANES (LANES / SLOTS)  // lanes that hold one score of a position and a head
#define OF_PART(part, g) (((kh * SPLITS + (part)) * GROUP + (g)) * (D + 2))
#ifdef HAS_parts
#define ALONE true
#else
#define ALONE false
#endif

// The next part's sums behind those of the parts before it, which shrink by `mine`.
#define JOIN(sum, mine, of_part, theirs) sum = __fmaf_rn(sum, mine, __fmul_rn(of_part, theirs))

static __device__ __forceinline__ void finish(SIGNATURE, int head, int i, float top, float total, float sum) {
#ifdef HAS_sinks
  const float sink = (float)sinks[head] * LOG2E, high = fmaxf(top, sink), share = SHARE(top, high);
  total = __fmaf_rn(total, share, exp2f(sink - high));
  sum = __fmul_rn(sum, share);
#endif
  y[((i64)blockIdx.y * P_heads + head) * D + i] = sum / total;
}

static __device__ __forceinline__ void in_parts(SIGNATURE) {
  const int r = blockIdx.y, t = threadIdx.x, lane = t % 32, warp = t / 32;
  const i64 past = *length, pos = past + r, end = pos + 1;
  const i64 start = P_window > 0 && end > P_window ? end - P_window : 0;
  const int seen = (int)(end - start), least = (seen + SPLITS - 1) / SPLITS;
  const int span = ((least > LEAST ? least : LEAST) + TEAM * TAKEN - 1) / (TEAM * TAKEN) * (TEAM * TAKEN);
  const int count = (seen + span - 1) / span;
#ifdef HAS_parts
  const int kh = blockIdx.x / SPLITS, part = blockIdx.x % SPLITS;
  if (kh >= P_kv_heads || part >= count) return;
  const bool holds_new = part == count - 1;
#else
  if (blockIdx.x % GROUP) return;
  const int kh = blockIdx.x / GROUP;
  const bool holds_new = true;
#endif
  const Turns turns = turns_of(PASSED);
  const TABLE *c = turns.c, *s = turns.s;
  const query_t *new_keys = NEW_KEYS, *new_values = NEW_VALUES;
  const int own = t % LANES * EACH, team = warp / TEAM;
  const k_cache_t *keys = k_cache + kh * k_cache_head, *values = v_cache + kh * v_cache_head;
  Raw k[AT_ONCE], v[AT_ONCE], next_k[AT_ONCE], next_v[AT_ONCE];
  // The cached ones among the positions of this lane from `from` on; those of this launch come from its inputs.
  const auto fetch = [&](Raw (&to_k)[AT_ONCE], Raw (&to_v)[AT_ONCE], i64 from, i64 until) {
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      const i64 p = from + lane / LANES * AT_ONCE + u;
      if (p < until && p < past) {
        to_k[u].load(keys + p * k_cache_position, own);
        to_v[u].load(values + p * v_cache_position, own);
      }
    }
  };
#ifdef HAS_parts
  const i64 first = start + (i64)part * span, until = first + span < end ? first + span : end;
  fetch(k, v, first + warp % TEAM * TAKEN, until);
#endif
  for (int n = warp; n < GROUP + 2; n += WARPS) {  // queries, then the new key and value
    if (n < GROUP) {
      const query_t* mine = query + (i64)r * QUERY_ROW + (kh * GROUP + n) * D;
      const float inverse = inverse_rms(mine, Q_GAMMA);
      for (int i = lane; i < D; i += 32) mixed[n * D + i] = turned(mine, Q_GAMMA, inverse, c, s, pos, i);
    } else if (holds_new) {
      const bool of_key = n == GROUP;
      const query_t* mine = (of_key ? new_keys : new_values) + (i64)r * KEY_ROW;
      const float inverse = of_key ? inverse_rms(mine, K_GAMMA) : 1.0f;
      for (int i = lane; i < D; i += 32) {
        const float made = of_key ? turned(mine, K_GAMMA, inverse, c, s, pos, i) : (float)mine[i];
        const float scale = of_key ? SCALE(k_scale, i) : SCALE(v_scale, i);
        (of_key ? new_key : new_value)[i] = seen_new(made, scale);
        k_cache_t* to = of_key ? k_cache + pos * k_cache_position + kh * k_cache_head
                               : v_cache + pos * v_cache_position + kh * v_cache_head;
        to[i] = to_cache(made, scale);
      }
    }
  }
  __syncthreads();
  float of_q[HEADS][EACH];
#pragma unroll
  for (int g = 0; g < HEADS; ++g) {
    const int head = team * HEADS + g < GROUP ? team * HEADS + g : GROUP - 1;  // where a team has fewer, one twice
#pragma unroll
    for (int e = 0; e < EACH; ++e) of_q[g][e] = own + e < D ? mixed[head * D + own + e] : 0;
  }
  __syncthreads();
#ifndef HAS_parts
  constexpr int PER = (GROUP * D + THREADS - 1) / THREADS;
  float all_top[PER], all_total[PER], all_sum[PER];
#pragma unroll
  for (int n = 0; n < PER; ++n) { all_top[n] = -INFINITE; all_total[n] = all_sum[n] = 0; }
  for (int part = 0; part < count; ++part) {
  const i64 first = start + (i64)part * span, until = first + span < end ? first + span : end;
  fetch(k, v, first + warp % TEAM * TAKEN, until);
#endif
  float acc[HEADS][EACH] = {}, top = -INFINITE, total = 0;  // top and total are of the head of this lane's slot
  const int slot = lane % LANES / SLOT_LANES;
#define HELD_BY(g) ((g) * SLOT_LANES)  // the first lane of a slot
  for (i64 from = first + warp % TEAM * TAKEN; from < until; from += TEAM * TAKEN) {
    fetch(next_k, next_v, from + TEAM * TAKEN, until);
    const i64 at = from + lane / LANES * AT_ONCE;
    const bool new_ones = from + TAKEN > past;  // some of the warp's
    float dots[SLOTS] = {};
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      const i64 p = at + u;
      float of_k[EACH];
#pragma unroll
      for (int e = 0; e < EACH; ++e) of_k[e] = own + e < D ? from_cache(k[u].at[e], SCALE(k_scale, own + e)) : 0;
      if (new_ones) {
        const query_t* row = new_keys + (p < past ? 0 : p < pos ? p - past : r) * KEY_ROW;
        const float inverse = ALONE ? 1.0f : inverse_rms(row, K_GAMMA);
        if (p >= past)
          for (int e = 0; e < EACH; ++e) {
            const int i = own + e;
            if (i >= D) of_k[e] = 0;
            else if (ALONE || p >= pos) of_k[e] = new_key[i];
            else of_k[e] = seen_new(turned(row, K_GAMMA, inverse, c, s, p, i), SCALE(k_scale, i));
          }
      }
#pragma unroll
      for (int g = 0; g < HEADS; ++g)
#pragma unroll
        for (int e = 0; e < EACH; ++e) dots[u * HEAD_SLOTS + g] = __fmaf_rn(of_q[g][e], of_k[e], dots[u * HEAD_SLOTS + g]);
    }
    // Half of the dots for half of the lanes, and so on: each lane ends with the whole of one.
#pragma unroll
    for (int n = SLOTS / 2, m = LANES / 2; n; n >>= 1, m >>= 1)
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float sent = lane & m ? dots[i] : dots[i + n], kept = lane & m ? dots[i + n] : dots[i];
        dots[i] = kept + __shfl_xor_sync(EVERYONE, sent, m);
      }
#pragma unroll
    for (int m = SLOT_LANES / 2; m; m >>= 1) dots[0] += __shfl_xor_sync(EVERYONE, dots[0], m);
    float dot = dots[0] * P_scale;
#ifdef SOFTCAP
    dot = P_softcap * tanhf(dot / P_softcap);
#endif
    dot *= LOG2E;
    const bool in = at + slot / HEAD_SLOTS < until;
    float high = in ? fmaxf(top, dot) : top;
    if (AT_ONCE == 2) high = fmaxf(high, __shfl_xor_sync(EVERYONE, high, LANES / 2));
    const float shrink = SHARE(top, high), weight = in ? exp2f(dot - high) : 0.0f;
    total = __fmaf_rn(total, shrink, weight);
    top = high;
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      const i64 p = at + u;
      float of_v[EACH];
#pragma unroll
      for (int e = 0; e < EACH; ++e)
        of_v[e] = own + e < D && p < until ? from_cache(v[u].at[e], SCALE(v_scale, own + e)) : 0;
      if (new_ones && p >= past && p < until)
        for (int e = 0; e < EACH; ++e) {
          const int i = own + e;
          if (i >= D) of_v[e] = 0;
          else if (ALONE || p >= pos) of_v[e] = new_value[i];
          else of_v[e] = seen_new((float)new_values[(p - past) * KEY_ROW + i], SCALE(v_scale, i));
        }
#pragma unroll
      for (int g = 0; g < HEADS; ++g) {
        const float of_g = __shfl_sync(EVERYONE, weight, HELD_BY(u * HEAD_SLOTS + g), LANES);
        const float less = u ? 1.0f : __shfl_sync(EVERYONE, shrink, HELD_BY(g), LANES);
#pragma unroll
        for (int e = 0; e < EACH; ++e)
          acc[g][e] = u ? __fmaf_rn(of_g, of_v[e], acc[g][e]) : __fmaf_rn(acc[g][e], less, __fmul_rn(of_g, of_v[e]));
      }
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) { k[u] = next_k[u]; v[u] = next_v[u]; }
  }
  if (AT_ONCE == 2) total += __shfl_xor_sync(EVERYONE, total, LANES / 2);
#pragma unroll
  for (int m = LANES; m < 32; m <<= 1) {
    const float other = __shfl_xor_sync(EVERYONE, top, m), high = fmaxf(top, other);
    const float mine = SHARE(top, high), theirs = SHARE(other, high);
    total = total * mine + __shfl_xor_sync(EVERYONE, total, m) * theirs;
#pragma unroll
    for (int g = 0; g < HEADS; ++g) {
      const float keep = __shfl_sync(EVERYONE, mine, HELD_BY(g), LANES), take = __shfl_sync(EVERYONE, theirs, HELD_BY(g), LANES);
#pragma unroll
      for (int e = 0; e < EACH; ++e) acc[g][e] = acc[g][e] * keep + __shfl_xor_sync(EVERYONE, acc[g][e], m) * take;
    }
    top = high;
  }
  if (lane < LANES) {
#pragma unroll
    for (int g = 0; g < HEADS; ++g)
#pragma unroll
      for (int e = 0; e < EACH; ++e) if (own + e < D) mixed[(warp * HEADS + g) * D + own + e] = acc[g][e];
    if (slot < HEADS && lane % SLOT_LANES == 0) { tops[warp * HEADS + slot] = top; totals[warp * HEADS + slot] = total; }
  }
  __syncthreads();
  // Element n / D, n % D of the part's sums for all heads, from the warps of the head's team.
  const auto of_part = [&](int n, float& high, float& all) {
    const int g = n / D, i = n % D, from = g / HEADS * TEAM, mine = g % HEADS;
    float sum = 0;
    high = -INFINITE, all = 0;
    for (int w = from; w < from + TEAM; ++w) high = fmaxf(high, tops[w * HEADS + mine]);
    for (int w = from; w < from + TEAM; ++w) {
      const float share = SHARE(tops[w * HEADS + mine], high);
      sum = __fmaf_rn(share, mixed[(w * HEADS + mine) * D + i], sum);
      all = __fmaf_rn(share, totals[w * HEADS + mine], all);
    }
    return sum;
  };
#ifndef HAS_parts
#pragma unroll
  for (int o = 0; o < PER; ++o)
    if (const int n = t + o * THREADS; n < GROUP * D) {
      float part_top, part_total;
      const float part_sum = of_part(n, part_top, part_total), high = fmaxf(all_top[o], part_top);
      const float mine = SHARE(all_top[o], high), theirs = SHARE(part_top, high);
      JOIN(all_total[o], mine, part_total, theirs);
      JOIN(all_sum[o], mine, part_sum, theirs);
      all_top[o] = high;
    }
  __syncthreads();
  }
#pragma unroll
  for (int o = 0; o < PER; ++o)
    if (const int n = t + o * THREADS; n < GROUP * D)
      finish(PASSED, kh * GROUP + n / D, n % D, all_top[o], all_total[o], all_sum[o]);
#else
  for (int n = t; n < GROUP * D; n += THREADS) {
    float part_top, part_total;
    float* to = parts + OF_PART(part, n / D);
    to[n % D] = of_part(n, part_top, part_total);
    if (n % D == 0) { to[D] = part_top; to[D + 1] = part_total; }
  }
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (t == 0) {
    u32* arrived = tickets + blockIdx.z * P_kv_heads + kh;
    is_last = atomicAdd(arrived, 1u) == count - 1;
    if (is_last) *arrived = 0;  // as the next launch finds it
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  float *part_tops = mixed, *part_totals = mixed + GROUP * SPLITS, *mine = part_totals + GROUP * SPLITS;
  float* theirs = mine + GROUP * SPLITS;
  for (int n = t; n < GROUP * count; n += THREADS) {
    const float* of = parts + OF_PART(n % count, n / count) + D;
    part_tops[n] = __ldcg(of);
    part_totals[n] = __ldcg(of + 1);
  }
  __syncthreads();
  for (int n = t; n < GROUP * count; n += THREADS) {
    float before = -INFINITE;
    for (int other = n / count * count; other < n; ++other) before = fmaxf(before, part_tops[other]);
    const float high = fmaxf(before, part_tops[n]);
    mine[n] = SHARE(before, high);
    theirs[n] = SHARE(part_tops[n], high);
  }
  __syncthreads();
  for (int n = t; n < GROUP * D; n += THREADS) {
    const int g = n / D;
    float top_of_all = -INFINITE, total_of_all = 0, sum = 0;
#pragma unroll 8
    for (int other = 0; other < count; ++other) {
      const int of = g * count + other;
      top_of_all = fmaxf(top_of_all, part_tops[of]);
      JOIN(total_of_all, mine[of], part_totals[of], theirs[of]);
      JOIN(sum, mine[of], __ldcg(parts + OF_PART(other, g) + n % D), theirs[of]);
    }
    finish(PASSED, kh * GROUP + g, n % D, top_of_all, total_of_all, sum);
  }
#endif
}
#endif
