// y = sum over k of a * b, at any steps: products of any two tensors. A warp an element of y.
BODY {
  const i64 i = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (i >= count) return;
  const a_t* left = a + offset(i, shape, a_steps, 0);
  const b_t* right = b + offset(i, shape, b_steps, 0);
  typename Sum<WIDE(a_t)>::type sum = 0;
  for (i64 k = lane; k < depth; k += 32) sum += (WIDE(a_t))left[k * a_deep] * (WIDE(b_t))right[k * b_deep];
  sum = warp_sum(sum);
  if (lane) return;
#ifdef KERNEL_gemm
  WIDE(a_t) made = (WIDE(a_t))((WIDE(a_t))P_alpha * sum);
#ifdef HAS_c
  made += (WIDE(a_t))P_beta * (WIDE(c_t))c[offset(i, shape, c_steps, 0)];
#endif
  y[i] = stored<y_t>(made);
#else
  y[i] = stored<y_t>((WIDE(a_t))sum);
#endif
}
