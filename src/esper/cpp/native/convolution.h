// Convolutions on rows of lanes: kernel 1 or 3, stride 1, zero padding; dense or depthwise.
//
//     in [C][H][W][lanes]     weight [O][C][k][k]     out [O][H][W][lanes]
//
// At each position only the taps inside the image are computed, so no product is with padding.

#pragma once

#include "lanes.h"

namespace esper {

constexpr int OUTPUTS = 8;   // whose weights are packed together
constexpr int SUMS = REGISTERS / 4, VECTORS = 2;  // sums at once: of so many outputs, for so many vectors of lanes
constexpr int MAX_TAPS = 9;
constexpr int64_t FIRST_CACHE = 32768, SECOND_CACHE = 524288;  // bytes that every processor has

struct Shape {
    int inputs, outputs, height, width, kernel;
    int space() const { return height * width; }
    int taps() const { return kernel * kernel; }
    Shape transposed() const { return {outputs, inputs, height, width, kernel}; }  // of the gradient of the input
};

// Offsets of the taps of one position: in the packed weights of an input, and in its features.
struct Taps {
    int count;
    int weight[MAX_TAPS];
    int64_t from[MAX_TAPS];
};

inline Taps taps_at(const Shape& s, int place, int stride) {
    Taps found;
    found.count = 0;
    const int y = place / s.width, x = place % s.width, reach = s.kernel / 2;
    for (int dy = -reach; dy <= reach; ++dy)
        for (int dx = -reach; dx <= reach; ++dx) {
            if (y + dy < 0 || y + dy >= s.height || x + dx < 0 || x + dx >= s.width) continue;
            found.weight[found.count] = ((dy + reach) * s.kernel + dx + reach) * OUTPUTS;
            found.from[found.count++] = static_cast<int64_t>((y + dy) * s.width + x + dx) * stride;
        }
    return found;
}

// How many positions from `place` on have the same taps and follow each other: rows of lanes that are full are one row.
inline int alike(const Shape& s, int place) {
    if (s.kernel == 1) return s.space() - place;
    const int x = place % s.width;
    return x == 0 || x + 1 >= s.width ? 1 : s.width - 1 - x;
}

// How many numbers `pack` writes.
inline int64_t packed_size(const Shape& s) {
    return int64_t((s.outputs + OUTPUTS - 1) / OUTPUTS) * OUTPUTS * s.inputs * s.taps();
}

// Weights in the order of the loops below: [block of outputs][input][tap][output of the block], zero past the last.
template <class T> void pack(const Shape& s, const T* weight, bool transposed, T* packed) {
    const int taps = s.taps();
    if (s.outputs % OUTPUTS) std::memset(packed, 0, sizeof(T) * packed_size(s));
    const auto at = [&](int o, int c) {
        return packed + (int64_t(o / OUTPUTS) * s.inputs + c) * taps * OUTPUTS + o % OUTPUTS;
    };
    if (transposed) {  // of the gradient of the input: from outputs to inputs, kernel flipped
        for (int c = 0; c < s.inputs; ++c)
            for (int o = 0; o < s.outputs; ++o)
                for (int tap = taps - 1; tap >= 0; --tap) at(o, c)[tap * OUTPUTS] = *weight++;
    } else {
        for (int o = 0; o < s.outputs; ++o)
            for (int c = 0; c < s.inputs; ++c)
                for (int tap = 0; tap < taps; ++tap) at(o, c)[tap * OUTPUTS] = *weight++;
    }
}

// Positions that are alike from `place` on, SUMS outputs from `first` on, and VS vectors of their lanes from `at` on.
template <class T, int VS>
void convolve_block(const Shape& s, const T* in, const T* packed, T* out, int first, int at, int lanes, int stride,
                    const Taps& taps, int place) {
    const int64_t channel = static_cast<int64_t>(s.space()) * stride;
    const int step = s.taps() * OUTPUTS;
    wide<T> sum[SUMS][VS] = {};
    const T* h = in + at;
    for (int c = 0; c < s.inputs; ++c, h += channel, packed += step)
        for (int i = 0; i < taps.count; ++i) {
            const T *row = h + taps.from[i], *w = packed + taps.weight[i];
            wide<T> x[VS];
            for (int v = 0; v < VS; ++v) x[v] = load(row + v * width<T>());
            for (int o = 0; o < SUMS; ++o)
                for (int v = 0; v < VS; ++v) sum[o][v] += w[o] * x[v];
        }
    T* to = out + first * channel + static_cast<int64_t>(place) * stride + at;
    const int outputs = s.outputs - first;
    if (outputs >= SUMS && lanes - at >= VS * width<T>()) {
        for (int o = 0; o < SUMS; ++o, to += channel)
            for (int v = 0; v < VS; ++v) store<T>(to + v * width<T>(), sum[o][v]);
        return;
    }
    for (int o = 0; o < SUMS; ++o, to += channel)
        if (o < outputs)
            for (int v = 0; v < VS; ++v) store_lanes<T>(to + v * width<T>(), sum[o][v], lanes - at - v * width<T>());
}

// `scratch` holds the packed weights.
template <class T>
void convolve(const Shape& s, const T* in, const T* weight, bool transposed, T* out, int lanes, int stride,
              T* scratch) {
    pack(s, weight, transposed, scratch);
    const int64_t block = static_cast<int64_t>(s.inputs) * s.taps() * OUTPUTS;
    const int blocks = (s.outputs + OUTPUTS - 1) / OUTPUTS;
    // weights that exceed the first cache: all positions of one block of outputs before the next block
    const int group = block * blocks * static_cast<int64_t>(sizeof(T)) > FIRST_CACHE ? 1 : blocks;
    for (int begin = 0; begin < blocks; begin += group)
        for (int place = 0, places; place < s.space(); place += places) {
            const Taps taps = taps_at(s, place, stride);
            places = lanes == stride ? alike(s, place) : 1;
            const int end = places * stride, full = places * lanes;
            for (int at = 0; at < end; at += VECTORS * width<T>())
                for (int o = begin * OUTPUTS; o < (begin + group) * OUTPUTS && o < s.outputs; o += SUMS) {
                    const T* packed = scratch + o / OUTPUTS * block + o % OUTPUTS;
                    if (at + VECTORS * width<T>() <= end)
                        convolve_block<T, VECTORS>(s, in, packed, out, o, at, full, stride, taps, place);
                    else
                        convolve_block<T, 1>(s, in, packed, out, o, at, full, stride, taps, place);
                }
        }
}

// A part of the features: rows of the image, and lanes.
struct Part {
    int top, bottom, at, end;
};

// Gradients of a tile of weights of kernel 1, over a part of the features.
template <class T, int OS, int CS>
void pointwise_weight_grad(const Shape& s, const T* in, const T* grad_out, T* grad, int o, int c, Part part,
                           int stride) {
    const int64_t channel = static_cast<int64_t>(s.space()) * stride;
    wide<T> sum[OS][CS] = {};
    for (int place = part.top * s.width; place < part.bottom * s.width; ++place)
        for (int lane = part.at; lane < part.end; lane += width<T>()) {
            const int64_t from = static_cast<int64_t>(place) * stride + lane;
            wide<T> x[CS];
            for (int j = 0; j < CS; ++j) x[j] = load(in + (c + j) * channel + from);
            for (int i = 0; i < OS; ++i) {
                const wide<T> g = load(grad_out + (o + i) * channel + from);
                for (int j = 0; j < CS; ++j) sum[i][j] += g * x[j];
            }
        }
    for (int i = 0; i < OS; ++i)
        for (int j = 0; j < CS; ++j) grad[(o + i) * s.inputs + c + j] += total<T>(sum[i][j]);
}

// The same for row `dy` of a kernel of 3: three neighbours slide along a row of the image, so each is loaded once.
template <class T, int OS, int CS>
void kernel_row_weight_grad(const Shape& s, const T* in, const T* grad_out, T* grad, int o, int c, int dy, Part part,
                            int stride) {
    const int64_t channel = static_cast<int64_t>(s.space()) * stride;
    wide<T> sum[OS][CS][3] = {};
    const int first = part.top + dy < 0 ? 1 : part.top, last = part.bottom + dy > s.height ? s.height - 1 : part.bottom;
    for (int y = first; y < last; ++y)
        for (int lane = part.at; lane < part.end; lane += width<T>()) {
            const T* g = grad_out + o * channel + static_cast<int64_t>(y) * s.width * stride + lane;
            const T* h = in + c * channel + static_cast<int64_t>(y + dy) * s.width * stride + lane;
            wide<T> left[CS] = {}, here[CS], right[CS];
            for (int j = 0; j < CS; ++j) here[j] = load(h + j * channel);
            for (int x = 0; x < s.width; ++x, g += stride) {
                h += stride;
                for (int j = 0; j < CS; ++j) right[j] = x + 1 < s.width ? load(h + j * channel) : wide<T>{};
                for (int i = 0; i < OS; ++i) {
                    const wide<T> to = load(g + i * channel);
                    for (int j = 0; j < CS; ++j) {
                        sum[i][j][0] += to * left[j];
                        sum[i][j][1] += to * here[j];
                        sum[i][j][2] += to * right[j];
                    }
                }
                for (int j = 0; j < CS; ++j) left[j] = here[j], here[j] = right[j];
            }
        }
    for (int i = 0; i < OS; ++i)
        for (int j = 0; j < CS; ++j)
            for (int dx = 0; dx < 3; ++dx)
                grad[((o + i) * s.inputs + c + j) * 9 + (dy + 1) * 3 + dx] += total<T>(sum[i][j][dx]);
}

template <class T, int OS, int CS>
void tile_weight_grad(const Shape& s, const T* in, const T* grad_out, T* grad, int o, int c, Part part, int stride) {
    if (s.kernel == 1) return pointwise_weight_grad<T, OS, CS>(s, in, grad_out, grad, o, c, part, stride);
    for (int dy = -1; dy <= 1; ++dy) kernel_row_weight_grad<T, OS, CS>(s, in, grad_out, grad, o, c, dy, part, stride);
}

// Tiles of four outputs and CS inputs, whose sums fit into the registers.
template <class T, int CS>
void tiles_weight_grad(const Shape& s, const T* in, const T* grad_out, T* grad, int o, Part part, int stride) {
    int c = 0;
    for (; c + CS <= s.inputs; c += CS) tile_weight_grad<T, 4, CS>(s, in, grad_out, grad, o, c, part, stride);
    for (; c < s.inputs; ++c) tile_weight_grad<T, 4, 1>(s, in, grad_out, grad, o, c, part, stride);
}

// All tiles of weights over one part of the features at a time, which stays in the second cache; in the first one with
// kernel 1, where each number is used in few products.
template <class T> void convolve_weight_grad(const Shape& s, const T* in, const T* grad_out, T* grad, int stride) {
    const int64_t cache = s.kernel == 1 ? 2 * FIRST_CACHE : SECOND_CACHE;
    const int64_t row = static_cast<int64_t>(BYTES) * s.width * (s.inputs + s.outputs);  // bytes of a vector of lanes in a row of the image
    int step = static_cast<int>(cache / (row * s.height)) * width<T>();
    step = step > stride ? stride : step < width<T>() ? width<T>() : step;
    int height = static_cast<int>(cache * width<T>() / (row * step));
    height = height > s.height ? s.height : height < 1 ? 1 : height;
    for (int at = 0; at < stride; at += step)
        for (int top = 0; top < s.height; top += height) {
            const Part part{top, top + height < s.height ? top + height : s.height, at,
                            at + step < stride ? at + step : stride};
            int o = 0;
            for (; o + 4 <= s.outputs; o += 4) {
                if (s.kernel == 1 || REGISTERS == 32)
                    tiles_weight_grad<T, 2>(s, in, grad_out, grad, o, part, stride);
                else
                    tiles_weight_grad<T, 1>(s, in, grad_out, grad, o, part, stride);
            }
            for (; o < s.outputs; ++o)
                for (int c = 0; c < s.inputs; ++c) tile_weight_grad<T, 1, 1>(s, in, grad_out, grad, o, c, part, stride);
        }
}

// Each channel by itself; `transposed` for the gradient of the input.
template <class T>
void depthwise(const Shape& s, const T* in, const T* weight, bool transposed, T* out, int lanes, int stride) {
    const int64_t channel = static_cast<int64_t>(s.space()) * stride;
    for (int place = 0, places; place < s.space(); place += places) {
        const Taps taps = taps_at(s, place, stride);
        places = lanes == stride ? alike(s, place) : 1;
        for (int c = 0; c < s.inputs; ++c) {
            T factor[MAX_TAPS];
            for (int i = 0; i < taps.count; ++i) {
                const int tap = taps.weight[i] / OUTPUTS;
                factor[i] = weight[c * s.taps() + (transposed ? s.taps() - 1 - tap : tap)];
            }
            const T* h = in + c * channel;
            T* to = out + c * channel + static_cast<int64_t>(place) * stride;
            for (int lane = 0; lane < places * stride; lane += width<T>()) {
                wide<T> sum = {};
                for (int i = 0; i < taps.count; ++i) sum += factor[i] * load(h + taps.from[i] + lane);
                store_lanes<T>(to + lane, sum, places * lanes - lane);
            }
        }
    }
}

template <class T> void depthwise_weight_grad(const Shape& s, const T* in, const T* grad_out, T* grad, int stride) {
    const Shape one{1, 1, s.height, s.width, s.kernel};
    for (int c = 0; c < s.inputs; ++c) {
        const int64_t channel = static_cast<int64_t>(c) * s.space() * stride;
        const Part all{0, s.height, 0, stride};
        tile_weight_grad<T, 1, 1>(one, in + channel, grad_out + channel, grad + c * s.taps(), 0, 0, all, stride);
    }
}

}  // namespace esper
