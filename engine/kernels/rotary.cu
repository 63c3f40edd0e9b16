// Rotary embedding alone: thread i makes element i of y; tables b (cosines) and c (sines).
BODY {
  const i64 i = element();
  if (i >= count) return;
  const i64 e = i % P_size;
#ifdef P_layout_tokens
  const i64 token = i / P_size / n_heads % tokens;
#else
  const i64 token = i / P_size % tokens;
#endif
  float made = (float)a[i];
  if (e < 2 * P_half) {
    const int j = (int)(P_interleaved ? e / 2 : e % P_half);
    const i64 lo = i - e + (P_interleaved ? 2 * j : j), hi = P_interleaved ? lo + 1 : lo + P_half;
#if P_gathered
    const i64 row = b_batch ? i / (P_size * n_heads * tokens) * tokens + token : token;
#elif defined HAS_length
#ifdef SHIFT_ABOVE
    const i64 shift = *length + tokens + *ahead > P_long_above ? SHIFT_ABOVE : SHIFT_BELOW;
#else
    const i64 shift = 0;
#endif
    const i64 row = *length + token + shift;
#else
    const i64 row = ONE_POSITION ? d[0] + token : d[i / (P_size * n_heads * tokens) * tokens + token];
#endif
    const float cosine = (float)b[row * table_width + j], sine = (float)c[row * table_width + j];
    const float first = (float)a[lo], second = (float)a[hi];
    made = i == lo ? first * cosine - second * sine : first * sine + second * cosine;
  }
  y[i] = made;
}
