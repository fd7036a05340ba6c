#pragma once
#include "lanes.h"
#define ESPER_CONVOLUTIONS(X)                                                                                          \
    X(CONVOLVE, "xxxxx") X(CONVOLVE_INPUT_GRAD, "xxxx") X(CONVOLVE_WEIGHT_GRAD, "xxxxx")                               \
    X(MULTIPLY, "xxxxx") X(MULTIPLY_INPUT_GRAD, "xxxx") X(MULTIPLY_WEIGHT_GRAD, "xxxxx")
namespace esper {
struct Shape {
    int inputs, outputs, groups, height, width, out_height, out_width;
    int kernel_h, kernel_w, stride_h, stride_w, pad_top, pad_left, dilation_h, dilation_w;
};
struct Product { int positions, inputs, outputs; };
inline int64_t convolution_scratch(const Shape&) { return 1; }
inline int64_t product_scratch(const Product&) { return 1; }
template <class F> void each_tap(const Shape& s, F f) {
    const int in = s.inputs / s.groups, out = s.outputs / s.groups;
    for (int o = 0; o < s.outputs; ++o) for (int c = 0; c < in; ++c)
    for (int y = 0; y < s.out_height; ++y) for (int x = 0; x < s.out_width; ++x)
    for (int i = 0; i < s.kernel_h; ++i) for (int j = 0; j < s.kernel_w; ++j) {
        const int h = y * s.stride_h + i * s.dilation_h - s.pad_top, w = x * s.stride_w + j * s.dilation_w - s.pad_left;
        if (h < 0 || w < 0 || h >= s.height || w >= s.width) continue;
        f(((o / out * in + c) * s.height + h) * s.width + w, ((o * in + c) * s.kernel_h + i) * s.kernel_w + j, (o * s.out_height + y) * s.out_width + x);
    }
}
template <class T> void convolve(const Shape& s, const T* in, const T* w, const T* bias, T* out, int lanes, int stride, T*) {
    for (int r = 0; r < s.outputs * s.out_height * s.out_width; ++r) for (int l = 0; l < stride; ++l) out[r * stride + l] = bias && l < lanes ? bias[r / (s.out_height * s.out_width)] : T(0);
    each_tap(s, [&](int64_t a, int64_t b, int64_t o) { for (int l = 0; l < lanes; ++l) out[o * stride + l] += w[b] * in[a * stride + l]; });
}
template <class T> void convolve_input_grad(const Shape& s, const T* g, const T* w, T* in, int lanes, int stride, T*) {
    std::memset(in, 0, sizeof(T) * s.inputs * s.height * s.width * stride);
    each_tap(s, [&](int64_t a, int64_t b, int64_t o) { for (int l = 0; l < lanes; ++l) in[a * stride + l] += w[b] * g[o * stride + l]; });
}
template <class T> void convolve_weight_grad(const Shape& s, const T* in, const T* g, T* grad, T* gb, int lanes, int stride, T*) {
    each_tap(s, [&](int64_t a, int64_t b, int64_t o) { for (int l = 0; l < lanes; ++l) grad[b] += in[a * stride + l] * g[o * stride + l]; });
    if (gb) for (int r = 0; r < s.outputs * s.out_height * s.out_width; ++r) for (int l = 0; l < lanes; ++l) gb[r / (s.out_height * s.out_width)] += g[r * stride + l];
}
template <class T> void multiply(const Product& s, const T* in, const T* w, const T* bias, T* out, int lanes, int stride, T*) {
    for (int t = 0; t < s.positions; ++t) for (int o = 0; o < s.outputs; ++o) for (int l = 0; l < stride; ++l) {
        T sum = bias && l < lanes ? bias[o] : T(0);
        for (int c = 0; c < s.inputs; ++c) sum += w[o * s.inputs + c] * in[(t * s.inputs + c) * stride + l];
        out[(t * s.outputs + o) * stride + l] = sum; }
}
template <class T> void multiply_input_grad(const Product& s, const T* g, const T* w, T* in, int, int stride, T*) {
    for (int t = 0; t < s.positions; ++t) for (int c = 0; c < s.inputs; ++c) for (int l = 0; l < stride; ++l) {
        T sum = 0;
        for (int o = 0; o < s.outputs; ++o) sum += w[o * s.inputs + c] * g[(t * s.outputs + o) * stride + l];
        in[(t * s.inputs + c) * stride + l] = sum; }
}
template <class T> void multiply_weight_grad(const Product& s, const T* in, const T* g, T* grad, T* gb, int lanes, int stride, T*) {
    for (int t = 0; t < s.positions; ++t) for (int o = 0; o < s.outputs; ++o) for (int l = 0; l < lanes; ++l) {
        if (gb) gb[o] += g[(t * s.outputs + o) * stride + l];
        for (int c = 0; c < s.inputs; ++c) grad[o * s.inputs + c] += in[(t * s.inputs + c) * stride + l] * g[(t * s.outputs + o) * stride + l]; }
}
// -- instructions
inline Shape shape_of(const int32_t* n) { return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14]}; }
inline Product product_of(const int32_t* n) { return {n[0], n[1], n[2]}; }
template <class T> void run_CONVOLVE(const Call<T>& c) { convolve<T>(shape_of(c.n), c.p[0], c.p[1], c.p[2], c.p[3], c.chunk.lanes, c.chunk.stride, c.p[4]); }
template <class T> void run_CONVOLVE_INPUT_GRAD(const Call<T>& c) { convolve_input_grad<T>(shape_of(c.n), c.p[0], c.p[1], c.p[2], c.chunk.lanes, c.chunk.stride, c.p[3]); }
template <class T> void run_CONVOLVE_WEIGHT_GRAD(const Call<T>& c) { convolve_weight_grad<T>(shape_of(c.n), c.p[0], c.p[1], c.p[2], c.p[3], c.chunk.lanes, c.chunk.stride, c.p[4]); }
template <class T> void run_MULTIPLY(const Call<T>& c) { multiply<T>(product_of(c.n), c.p[0], c.p[1], c.p[2], c.p[3], c.chunk.lanes, c.chunk.stride, c.p[4]); }
template <class T> void run_MULTIPLY_INPUT_GRAD(const Call<T>& c) { multiply_input_grad<T>(product_of(c.n), c.p[0], c.p[1], c.p[2], c.chunk.lanes, c.chunk.stride, c.p[3]); }
template <class T> void run_MULTIPLY_WEIGHT_GRAD(const Call<T>& c) { multiply_weight_grad<T>(product_of(c.n), c.p[0], c.p[1], c.p[2], c.p[3], c.chunk.lanes, c.chunk.stride, c.p[4]); }
}  // namespace esper
