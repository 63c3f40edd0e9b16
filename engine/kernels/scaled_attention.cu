// The standard's Attention, a block for a batch's head (x) and row (y). Scores of all KEYS keys stand in shared memory.
BODY {
  extern __shared__ float total[];
  const int b = blockIdx.x / P_q_heads, h = blockIdx.x % P_q_heads, r = blockIdx.y, t = threadIdx.x;
  const int kh = h / (P_q_heads / P_kv_heads), fresh = (int)(keys - past);
  const float root = sqrtf(P_scale);
  const q_t* own = q + offset<3>(((i64)b * P_q_heads + h) * rows + r, q_shape, q_steps, 0);
#define NEW(which, j, i) which[b * which##_steps[0] + kh * which##_steps[1] + (j) * which##_steps[2] + (i)]
#ifdef HAS_past_key
#define KEY(j, i) ((j) < past ? (float)past_key[(((i64)b * P_kv_heads + kh) * past + (j)) * SIZE + (i)] \
                              : (float)NEW(k, (j) - past, i))
#define VALUE(j, i) ((j) < past ? (float)past_value[(((i64)b * P_kv_heads + kh) * past + (j)) * VALUE_SIZE + (i)] \
                                : (float)NEW(v, (j) - past, i))
#else
#define KEY(j, i) (float)NEW(k, j, i)
#define VALUE(j, i) (float)NEW(v, j, i)
#endif
  if (r == 0 && h % (P_q_heads / P_kv_heads) == 0) {
    const i64 to = ((i64)b * P_kv_heads + kh) * keys;
#ifdef HAS_present_key
    for (i64 n = t; n < keys * SIZE; n += blockDim.x) present_key[to * SIZE + n] = KEY(n / SIZE, n % SIZE);
#endif
#ifdef HAS_present_value
    for (i64 n = t; n < keys * VALUE_SIZE; n += blockDim.x)
      present_value[to * VALUE_SIZE + n] = VALUE(n / VALUE_SIZE, n % VALUE_SIZE);
#endif
  }
#ifdef HAS_lengths
  const i64 valid = lengths[b], before = valid - rows;
#else
  const i64 valid = keys, before = past;
#endif
  int open = 0;
  float top = -INFINITE;
#ifdef HAS_scores
  scores_t* kept = scores + (((i64)b * P_q_heads + h) * rows + r) * keys;
#endif
  for (i64 j = t; j < keys; j += blockDim.x) {
    float dot = 0;
    for (int i = 0; i < SIZE; ++i) dot += KEY(j, i) * root * ((float)own[i] * root);
#ifdef SOFTCAP
    dot = P_softcap * tanhf(dot / P_softcap);
#endif
    const i64 distance = r + before - j;
    bool allowed = j < valid;
    if (P_causal) allowed &= distance >= 0;
    if (P_left >= 0) allowed &= distance <= P_left;
    if (P_right >= 0) allowed &= -distance <= P_right;
    float bias = allowed ? 0.0f : -INFINITE;
#ifdef HAS_mask
    if (j >= mask_keys) bias += -INFINITE;
    else {
      const mask_t m = mask[b * mask_steps[0] + h * mask_steps[1] + r * mask_steps[2] + j * mask_steps[3]];
#ifdef MASK_IS_BOOL
      bias += m ? 0.0f : -INFINITE;
#else
      bias += (float)m;
#endif
    }
#endif
#ifdef HAS_scores
    if (P_probe < 2) kept[j] = dot;
    if (P_probe == 2) kept[j] = dot + bias;
#endif
    total[j] = dot + bias;
    open |= bias != -INFINITE;
    top = fmaxf(top, total[j]);
  }
  const bool any = __syncthreads_or(open);
  top = block_max(top);
  float part = 0;
  for (i64 j = t; j < keys; j += blockDim.x) { total[j] = any ? expf(total[j] - top) : 0.0f; part += total[j]; }
  const float sum = any ? block_sum(part) : 1.0f;
  __syncthreads();
  for (i64 j = t; j < keys; j += blockDim.x) {
    total[j] /= sum;
#ifdef HAS_scores
    if (P_probe == 3) kept[j] = total[j];
#endif
  }
  __syncthreads();
  for (int i = t; i < VALUE_SIZE; i += blockDim.x) {
    float mixed = 0;
    for (i64 j = 0; j < keys; ++j) mixed += total[j] * VALUE(j, i);
    y[b * y_steps[0] + h * y_steps[1] + r * y_steps[2] + i] = mixed;
  }
}
