// Which experts each token chose, a warp a token: the first half of a mixture whose experts lie apart.
BODY {
  float own[LOGITS_A_LANE];
  load_logits(router + (i64)blockIdx.x * EXPERTS, own);
  choose(own);
  __syncwarp();
  for (int n = threadIdx.x; n < P_k; n += 32) routed[(i64)blockIdx.x * P_k + n] = chosen[n];
}
