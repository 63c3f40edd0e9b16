// Grouped-query attention of new rows (y): rotary, the cache's write, and the sums over the cached positions. LANES lanes
// share a position, EACH elements a lane, and go from position to position with a running maximum; what they find is joined
// in one fixed order. What this launch adds to the cache is computed from its inputs wherever it is read, rounded as it is
// stored, so that no block waits for another and chunks cannot be felt. A context of up to SHORT positions has a block for
// a query head (x), a longer one goes in parts.
BODY {
  const int h = blockIdx.x, r = blockIdx.y, t = threadIdx.x, lane = t % 32, warp = t / 32;
  const i64 past = *length, pos = past + r, end = pos + 1;
  const i64 start = P_window > 0 && end > P_window ? end - P_window : 0;
#if SPLITS > 1
  if (end - start > SHORT) return in_parts(PASSED);
#endif
  if (h >= P_heads) return;
  const int kh = h / GROUP;
  const Turns turns = turns_of(PASSED);
  const TABLE *c = turns.c, *s = turns.s;
  const query_t *new_keys = NEW_KEYS, *new_values = NEW_VALUES;
  const i64 key_row = KEY_ROW, width = QUERY_ROW;
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
    for (int e = 0; e < EACH; ++e) if (own + e < D) mixed[warp * D + own + e] = acc[e];
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
      sum = __fmaf_rn(share, mixed[w * D + i], sum);
      all = __fmaf_rn(share, totals[w], all);
    }
    y[((i64)r * P_heads + h) * D + i] = sum / all;
  }
}
