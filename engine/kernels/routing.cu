// Before a body that routes: the P_k largest of a token's EXPERTS logits, ties to the lower index, numbers before what is
// none. One warp does it, and leaves them in `chosen`.
#define LOGITS_A_LANE ((EXPERTS + 31) / 32)
__shared__ int chosen[P_k];

__device__ void load_logits(const router_t* logits, float (&own)[LOGITS_A_LANE]) {
#pragma unroll
  for (int i = 0; i < LOGITS_A_LANE; ++i) {
    const int e = threadIdx.x + 32 * i;
    own[i] = e < EXPERTS ? (float)logits[e] + 0.0f : 0.0f;  // one zero
  }
}
__device__ void choose(const float (&own)[LOGITS_A_LANE]) {
  constexpr int EACH = LOGITS_A_LANE;
  const int lane = threadIdx.x;
  u32 order[EACH];  // as the numbers go; 0 is taken
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const u32 bits = __float_as_uint(own[i]);
    order[i] = lane + 32 * i >= EXPERTS ? 0 : is_nan(own[i]) ? 1 : bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  for (int n = 0; n < P_k; ++n) {
    u32 best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) if (order[i] > best) { best = order[i]; at = i; }
    const u32 largest = __reduce_max_sync(0xffffffffu, best);
    const int e = __reduce_min_sync(0xffffffffu, best == largest ? lane + 32 * at : 0x7fffffff);
#pragma unroll
    for (int i = 0; i < EACH; ++i) if (lane + 32 * i == e) order[i] = 0;
    if (lane == 0) chosen[n] = e;
  }
}
