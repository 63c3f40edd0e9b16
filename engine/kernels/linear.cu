// Linear attention and its company. A thread owns a column of a head's state, [dk] numbers, and goes token by token.
#if defined KERNEL_linear_gate
BODY {
  const i64 i = element();
  if (i >= count) return;
  const i64 h = i % width;
  y[i] = (float)c[h] * softplus((float)a[i] + (float)b[h]);
  y1[i] = sigmoid((float)d[i]);
}
#elif defined KERNEL_causal_conv
// A thread a channel; the state is the last TAPS - 1 inputs.
BODY {
  const i64 line = element();
  if (line >= count) return;
  const i64 channel = line % channels;
  float seen[TAPS];
#ifdef HAS_state
  for (int i = 0; i < TAPS - 1; ++i) seen[i] = state[line * (TAPS - 1) + i];
#else
  for (int i = 0; i < TAPS - 1; ++i) seen[i] = (float)past[line * (TAPS - 1) + i];
#endif
  for (i64 t = 0; t < tokens; ++t) {
    seen[TAPS - 1] = (float)x[line * tokens + t];
    float made = 0;
    for (int i = 0; i < TAPS; ++i) made += seen[i] * (float)weight[channel * TAPS + i];
#ifdef HAS_bias
    made += (float)bias[channel];
#endif
#ifndef P_activation_none
    made *= sigmoid(made);
#endif
    y[line * tokens + t] = made;
    for (int i = 0; i < TAPS - 1; ++i) seen[i] = seen[i + 1];
  }
#if defined HAS_state
  for (int i = 0; i < TAPS - 1; ++i) state[line * (TAPS - 1) + i] = seen[i];
#elif defined HAS_present
  for (int i = 0; i < TAPS - 1; ++i) present[line * (TAPS - 1) + i] = stored<present_t>(seen[i]);
#endif
}
#elif defined KERNEL_gated_delta_net
// The state is [batch, heads, DV, DK]: a column of it lies together.
__device__ float inverse_length(const float* v) {
#if P_l2_norm
  float sum = 0;
  for (int i = 0; i < DK; ++i) sum += v[i] * v[i];
  return 1.0f / sqrtf(sum + P_eps);
#else
  return 1.0f;
#endif
}
BODY {
  const i64 j = element();
  const int h = blockIdx.y % HEADS, batch = blockIdx.y / HEADS, qh = h / (HEADS / Q_HEADS);
  if (j >= DV) return;
  float* own = state + ((i64)blockIdx.y * DV + j) * DK;
  float s[DK];
  for (int i = 0; i < DK; ++i) s[i] = own[i];
  for (i64 t = 0; t < tokens; ++t) {
    const i64 at = batch * tokens + t, g = at * HEADS + h;
    const float *qt = q + (at * Q_HEADS + qh) * DK, *kt = k + (at * Q_HEADS + qh) * DK;
    const float ql = inverse_length(qt), kl = inverse_length(kt);
    const float decay = expf(-expf((float)a_log[h]) * softplus((float)gate[g] + (float)dt_bias[h]));
    const float write = sigmoid((float)beta[g]);
    float held = 0, out = 0;
    for (int i = 0; i < DK; ++i) { s[i] *= decay; held += s[i] * (kt[i] * kl); }
    const float u = write * (v[g * DV + j] - held);
    for (int i = 0; i < DK; ++i) { s[i] += kt[i] * kl * u; out += s[i] * (qt[i] * ql); }
    y[g * DV + j] = P_scale * out;
  }
  for (int i = 0; i < DK; ++i) own[i] = s[i];
}
#else
// The state is [batch, kv heads, DK, DV]. Query heads read it after the token's update; whichever heads are fewer repeat.
BODY {
  constexpr int OUT = P_q_heads > P_kv_heads ? P_q_heads : P_kv_heads, READERS = OUT / P_kv_heads;
  const i64 j = element();
  const int h = blockIdx.y % P_kv_heads, batch = blockIdx.y / P_kv_heads, kh = h / (P_kv_heads / P_k_heads);
  if (j >= DV) return;
  const i64 own = (i64)blockIdx.y * DK * DV + j;
  float s[DK];
#ifdef HAS_state
  for (int i = 0; i < DK; ++i) s[i] = state[own + (i64)i * DV];
#else
  for (int i = 0; i < DK; ++i) s[i] = (float)past[own + (i64)i * DV];
#endif
  for (i64 t = 0; t < tokens; ++t) {
    const i64 at = batch * tokens + t;
    const k_t* kt = k + (at * P_k_heads + kh) * DK;
    float u = (float)v[(at * P_kv_heads + h) * DV + j];
#ifdef HAS_decay
#if DECAYS == 1
    const float all = expf((float)decay[at * P_kv_heads + h]);
    for (int i = 0; i < DK; ++i) s[i] *= all;
#else
    for (int i = 0; i < DK; ++i) s[i] *= expf((float)decay[(at * P_kv_heads + h) * DK + i]);
#endif
#endif
#ifdef HAS_beta
    float held = 0;
    for (int i = 0; i < DK; ++i) held += s[i] * (float)kt[i];
    u = (float)beta[BETAS == 1 ? at : at * P_kv_heads + h] * (u - held);
#endif
    for (int i = 0; i < DK; ++i) s[i] += (float)kt[i] * u;
    for (int n = 0; n < READERS; ++n) {
      const int o = h * READERS + n;
      const q_t* qt = q + (at * P_q_heads + o / (OUT / P_q_heads)) * DK;
      float out = 0;
      for (int i = 0; i < DK; ++i) out += s[i] * (float)qt[i];
      y[(at * OUT + o) * DV + j] = P_scale * out;
    }
  }
#if defined HAS_state
  for (int i = 0; i < DK; ++i) state[own + (i64)i * DV] = s[i];
#elif defined HAS_present
  for (int i = 0; i < DK; ++i) present[own + (i64)i * DV] = stored<present_t>(s[i]);
#endif
}
#endif
