// Why racecheck's hazards in the forward attention kernels for sm_90a are the tool's. A warp writes a note to shared memory, __syncwarp orders
// its lanes, one lane arrives at an mbarrier for all of them, and another warp waits there and reads. The memory model allows that: __syncwarp
// makes the lanes' writes happen before the arrival, which releases. On an H200 (CUDA 13.0) compute-sanitizer reports 100 hazards; with an
// argument every lane arrives itself, and it reports none.
//
//   nvcc -arch=sm_90a -o control scripts/racecheck_control.cu
//   compute-sanitizer --tool racecheck ./control; compute-sanitizer --tool racecheck ./control each
#include <cstdint>
#include <cstdio>

__global__ void note(int* out, bool each) {
    __shared__ alignas(8) uint64_t barrier;
    __shared__ int words[32];
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(&barrier);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(each ? 32 : 1) : "memory");
    __syncthreads();
    if (warp == 0) {
        words[lane] = lane * 3;
        __syncwarp();
        if (each || lane == 0) asm volatile("mbarrier.arrive.release.cta.shared.b64 _, [%0];" ::"r"(at) : "memory");
    } else {
        asm volatile("{.reg .pred p;\nw: mbarrier.try_wait.parity.acquire.cta.shared.b64 p, [%0], 0;\n@!p bra w;\n}" ::"r"(at) : "memory");
        out[threadIdx.x] = words[31 - lane];
    }
}

int main(int arguments, char**) {
    int* out;
    cudaMalloc(&out, 64 * sizeof(int));
    note<<<1, 64>>>(out, arguments > 1);
    printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
