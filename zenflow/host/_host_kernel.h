/* The host kernel's functions: what _host_kernel.c exports and _host_pool.c calls. */
#ifndef ZENFLOW_HOST_KERNEL_H
#define ZENFLOW_HOST_KERNEL_H

#include <stdint.h>

#if defined(__GNUC__)
#define EXPORT __attribute__((visibility("default")))
#elif defined(_MSC_VER)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT
#endif

/* Raised with every change of a signature: library.py refuses a library built from other code. */
#define INTERFACE 3

EXPORT void zenflow_accumulate(float *acc, const void *grad, int dtype, int64_t n, float scale,
                               int first);

EXPORT void zenflow_moments(float *exp_avg, float *exp_avg_sq, const void *grad, int dtype,
                            int64_t n, float scale, float beta2, float one_minus_beta1,
                            float one_minus_beta2);

EXPORT void zenflow_adamw(float *master, float *exp_avg, float *exp_avg_sq, void *out,
                          int out_dtype, const void *grad, int grad_dtype, float grad_scale,
                          const float *acc, float count, int64_t rows, int64_t cols,
                          const float *step_size, const float *denom_scale, const uint8_t *active,
                          float beta2, float one_minus_beta1, float one_minus_beta2, float eps,
                          float decay, float prediction);

#endif
