// Convolutions on rows of lanes: kernel 1 or 3, stride 1, zero border, no groups; and depthwise ones.
//
//     in [C][H][W][lanes]     weight [O][C][k][k]     out [O][H][W][lanes]
//
// A position has only the taps that fall into the image, so nothing is multiplied with the zeros of the border.

#pragma once

#include "lanes.h"

namespace esper {

constexpr int OUTPUTS = 8;   // rows of accumulators
constexpr int VECTORS = 2;   // vectors of lanes in each
constexpr int MAX_TAPS = 9;

struct Shape {
    int inputs, outputs, height, width, kernel;
    int space() const { return height * width; }
    int taps() const { return kernel * kernel; }
};

struct Taps {
    int count, tap[MAX_TAPS], from[MAX_TAPS];
};

inline Taps taps_at(const Shape& s, int y, int x) {
    Taps found{0, {}, {}};
    const int reach = s.kernel / 2;
    for (int dy = -reach; dy <= reach; ++dy)
        for (int dx = -reach; dx <= reach; ++dx) {
            if (y + dy < 0 || y + dy >= s.height || x + dx < 0 || x + dx >= s.width) continue;
            found.tap[found.count] = (dy + reach) * s.kernel + dx + reach;
            found.from[found.count++] = (y + dy) * s.width + x + dx;
        }
    return found;
}

// Weights as the loops below want them: [block of outputs][input][tap][output of the block], zero past the last.
template <class T> void pack(const Shape& s, const T* weight, bool transposed, T* packed) {
    const int taps = s.taps();
    for (int first = 0; first < s.outputs; first += OUTPUTS)
        for (int c = 0; c < s.inputs; ++c)
            for (int tap = 0; tap < taps; ++tap)
                for (int o = first; o < first + OUTPUTS; ++o) {
                    T value = T(0);
                    if (o < s.outputs)  // the gradient runs from outputs to inputs, through the kernel turned round
                        value = transposed ? weight[(c * s.outputs + o) * taps + taps - 1 - tap]
                                           : weight[(o * s.inputs + c) * taps + tap];
                    *packed++ = value;
                }
}

template <class T, int VS>
void convolve_block(const Shape& s, const T* in, const T* packed, T* out, int first, int at, int lanes, int stride,
                    const Taps& taps, int place) {
    wide<T> sum[OUTPUTS][VS] = {};
    const T* weight = packed;
    for (int c = 0; c < s.inputs; ++c) {
        const T* channel = in + static_cast<int64_t>(c) * s.space() * stride + at;
        for (int i = 0; i < taps.count; ++i) {
            const T* row = channel + static_cast<int64_t>(taps.from[i]) * stride;
            const T* w = weight + taps.tap[i] * OUTPUTS;
            wide<T> x[VS];
            for (int v = 0; v < VS; ++v) x[v] = load(row + v * width<T>());
            for (int o = 0; o < OUTPUTS; ++o)
                for (int v = 0; v < VS; ++v) sum[o][v] += w[o] * x[v];
        }
        weight += s.taps() * OUTPUTS;
    }
    for (int o = 0; o < OUTPUTS && first + o < s.outputs; ++o)
        for (int v = 0; v < VS; ++v) {
            const int lane = at + v * width<T>();
            T* to = out + (static_cast<int64_t>(first + o) * s.space() + place) * stride + lane;
            store_lanes<T>(to, sum[o][v], lanes - lane);
        }
}

// `scratch` holds the packed weights.
template <class T>
void convolve(const Shape& s, const T* in, const T* weight, bool transposed, T* out, int lanes, int stride, T* scratch) {
    pack(s, weight, transposed, scratch);
    const int64_t block = static_cast<int64_t>(s.inputs) * s.taps() * OUTPUTS;
    for (int place = 0; place < s.space(); ++place) {
        const Taps taps = taps_at(s, place / s.width, place % s.width);
        for (int at = 0; at < stride; at += VECTORS * width<T>())
            for (int first = 0; first < s.outputs; first += OUTPUTS) {
                const T* packed = scratch + first / OUTPUTS * block;
                if (at + VECTORS * width<T>() <= stride)
                    convolve_block<T, VECTORS>(s, in, packed, out, first, at, lanes, stride, taps, place);
                else
                    convolve_block<T, 1>(s, in, packed, out, first, at, lanes, stride, taps, place);
            }
    }
}

// Gradients of a tile of weights, added up over the lanes from `at` on.
template <class T, int OS, int CS>
void weigh_tile(const Shape& s, const T* in, const T* slope, T* grad, int o, int c, int at, int end, int stride, int tap) {
    wide<T> sum[OS][CS] = {};
    const int reach = s.kernel / 2, dy = tap / s.kernel - reach, dx = tap % s.kernel - reach;
    for (int y = dy < 0 ? -dy : 0; y < s.height - (dy > 0 ? dy : 0); ++y)
        for (int x = dx < 0 ? -dx : 0; x < s.width - (dx > 0 ? dx : 0); ++x) {
            const T* g = slope + (static_cast<int64_t>(o) * s.space() + y * s.width + x) * stride;
            const T* h = in + (static_cast<int64_t>(c) * s.space() + (y + dy) * s.width + x + dx) * stride;
            for (int lane = at; lane < end; lane += width<T>()) {
                wide<T> from[CS];
                for (int j = 0; j < CS; ++j) from[j] = load(h + static_cast<int64_t>(j) * s.space() * stride + lane);
                for (int i = 0; i < OS; ++i) {
                    const wide<T> to = load(g + static_cast<int64_t>(i) * s.space() * stride + lane);
                    for (int j = 0; j < CS; ++j) sum[i][j] += to * from[j];
                }
            }
        }
    for (int i = 0; i < OS; ++i)
        for (int j = 0; j < CS; ++j) grad[((o + i) * s.inputs + c + j) * s.taps() + tap] += total<T>(sum[i][j]);
}

template <class T> void weigh(const Shape& s, const T* in, const T* slope, T* grad, int stride) {
    std::memset(grad, 0, sizeof(T) * s.outputs * s.inputs * s.taps());
    // few lanes at a time where the features of all of them do not fit the first cache
    const int64_t bytes_of_vector = 64LL * s.space() * (s.inputs + s.outputs);
    int step = bytes_of_vector > 0 ? static_cast<int>(65536 / bytes_of_vector) * width<T>() : stride;
    if (step < width<T>()) step = width<T>();
    for (int at = 0; at < stride; at += step) {
        const int end = at + step < stride ? at + step : stride;
        for (int tap = 0; tap < s.taps(); ++tap) {
            int o = 0;
            for (; o + 4 <= s.outputs; o += 4) {
                int c = 0;
                for (; c + 4 <= s.inputs; c += 4) weigh_tile<T, 4, 4>(s, in, slope, grad, o, c, at, end, stride, tap);
                for (; c < s.inputs; ++c) weigh_tile<T, 4, 1>(s, in, slope, grad, o, c, at, end, stride, tap);
            }
            for (; o < s.outputs; ++o)
                for (int c = 0; c < s.inputs; ++c)
                    weigh_tile<T, 1, 1>(s, in, slope, grad, o, c, at, end, stride, tap);
        }
    }
}

// Each channel by itself. `turned` runs the gradient of the input.
template <class T>
void depthwise(const Shape& s, const T* in, const T* weight, bool turned, T* out, int lanes, int stride) {
    for (int c = 0; c < s.inputs; ++c)
        for (int place = 0; place < s.space(); ++place) {
            const Taps taps = taps_at(s, place / s.width, place % s.width);
            const int64_t channel = static_cast<int64_t>(c) * s.space();
            const T* w = weight + c * s.taps();
            for (int lane = 0; lane < stride; lane += width<T>()) {
                wide<T> sum = {};
                for (int i = 0; i < taps.count; ++i) {
                    const T factor = w[turned ? s.taps() - 1 - taps.tap[i] : taps.tap[i]];
                    sum += factor * load(in + (channel + taps.from[i]) * stride + lane);
                }
                store_lanes<T>(out + (channel + place) * stride + lane, sum, lanes - lane);
            }
        }
}

template <class T> void weigh_depthwise(const Shape& s, const T* in, const T* slope, T* grad, int stride) {
    const Shape one{1, 1, s.height, s.width, s.kernel};
    std::memset(grad, 0, sizeof(T) * s.inputs * s.taps());
    for (int c = 0; c < s.inputs; ++c) {
        const int64_t channel = static_cast<int64_t>(c) * s.space() * stride;
        for (int tap = 0; tap < s.taps(); ++tap)
            weigh_tile<T, 1, 1>(one, in + channel, slope + channel, grad + c * s.taps(), 0, 0, 0, stride, stride, tap);
    }
}

}  // namespace esper
