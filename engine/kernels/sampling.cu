// The choice of a token, and the step's end. Ties go to the lowest id; one logit that is not finite makes the gap NaN.
#ifndef KERNEL_advance
struct Best {
  float value, second;
  int at, wrong;
  // A total order, so that it does not matter in which order parts are joined.
  __device__ void join(const Best& o) {
    const bool other = o.value > value || (o.value == value && o.at < at);
    second = fmaxf(fmaxf(second, o.second), other ? value : o.value);
    if (other) { value = o.value; at = o.at; }
    wrong |= o.wrong;
  }
  __device__ void join_warp() {
    for (int m = 16; m; m >>= 1)
      join({__shfl_xor_sync(0xffffffffu, value, m), __shfl_xor_sync(0xffffffffu, second, m),
            __shfl_xor_sync(0xffffffffu, at, m), __shfl_xor_sync(0xffffffffu, wrong, m)});
  }
  // Of all threads of a block; the first warp gets it.
  __device__ void join_block() {
    __shared__ Best parts[32];
    join_warp();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = *this;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    *this = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : none();
    join_warp();
  }
  static __device__ Best none() { return {-INFINITE, -INFINITE, 0x7fffffff, 0}; }
};
#endif
#if defined KERNEL_argmax || defined KERNEL_rank
BODY {
#ifdef KERNEL_argmax
  const int first = 0, end = (int)width;
#else
  const int first = blockIdx.x * P_each, end = first + P_each < width ? first + P_each : (int)width;
#endif
  Best best = Best::none();
  for (int i = first + threadIdx.x; i < end; i += blockDim.x) {
    const float v = (float)logits[start + i];
    best.join({v, -INFINITE, i, !finite(v)});
  }
  best.join_block();
  if (threadIdx.x) return;
#ifdef KERNEL_argmax
  ids[0] = best.at < end ? best.at : 0;
  gap[0] = best.wrong ? NOT_A_NUMBER : fminf(best.value - best.second, LARGEST);
#else
  y[2 * blockIdx.x] = best.value;
  y[2 * blockIdx.x + 1] = best.wrong ? NOT_A_NUMBER : best.second;
  y1[blockIdx.x] = best.at < end ? best.at : first;
#endif
}
#elif defined KERNEL_choose
BODY {
  Best best = Best::none();
  for (int i = threadIdx.x; i < parts; i += blockDim.x) best.join({a[2 * i], a[2 * i + 1], b[i], is_nan(a[2 * i + 1])});
  best.join_block();
  if (threadIdx.x) return;
  ids[0] = best.at < 0x7fffffff ? best.at : b[0];
  gap[0] = best.wrong ? NOT_A_NUMBER : fminf(best.value - best.second, LARGEST);
  *length += P_rows;
}
#else
BODY {
  if (threadIdx.x == 0) *length += P_rows;
}
#endif
