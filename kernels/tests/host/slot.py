s=open('kernels/cuda/step_cluster.cuh').read()
a=s.index('// Digits of 256 inputs, and of each 64'); b=s.index('#if __CUDA_ARCH__ >= 900',a)
c=s.index('// 64 values as digits, PAIRED'); d=s.index('// Sums each of N values over the warp')
open('slot.cuh','w').write(s[a:b]+s[c:d])
