// Convolutions and linear layers on rows of lanes, forward and backward: any kernel, stride, padding, dilation, groups.
//
//     convolution     in [C][H][W][lanes]     weight [O][C / groups][kh][kw]     out [O][H'][W'][lanes]
//     product         in [T][I][lanes]        weight [O][I]                      out [T][O][lanes]
//
// At each position only the taps inside the image are computed, so no product is with padding.

#pragma once

#include <algorithm>
#include <vector>

#include "lanes.h"

// X(name, operands): see program.cpp.
#define ESPER_CONVOLUTIONS(X)                                                                                          \
    X(CONVOLVE, "xxxxx") X(CONVOLVE_INPUT_GRAD, "xxxx") X(CONVOLVE_WEIGHT_GRAD, "xxxxx")                               \
    X(MULTIPLY, "xxxxx") X(MULTIPLY_INPUT_GRAD, "xxxx") X(MULTIPLY_WEIGHT_GRAD, "xxxxx")

// Loops of few steps over vectors, so that arrays of vectors stay in registers.
#define ESPER_UNROLL _Pragma("GCC unroll 32")

namespace esper {

constexpr int SUMS = REGISTERS / 4;                            // outputs whose sums are computed at once
constexpr int64_t FIRST_CACHE = 32768, SECOND_CACHE = 524288;  // bytes that every processor has

struct Shape {  // of a convolution: input [inputs][height][width], output [outputs][out_height][out_width]
    int inputs, outputs, groups, height, width, out_height, out_width;
    int kernel_h, kernel_w, stride_h, stride_w, pad_top, pad_left, dilation_h, dilation_w;
};

struct Product {  // a linear layer on a sequence: in [positions][inputs], out [positions][outputs]
    int positions, inputs, outputs;
};

// -- which taps a position has -----------------------------------------------------------------------------------------

// One axis of the image: at output x, tap k reads input (x * up + shift + k * tap) / down, if that is whole and inside.
// The gradient of the input is a convolution of this kind, too.
struct Axis {
    int outputs, inputs, kernel, up, down, shift, tap;
};

// Positions first, first + step, ... that have the same taps: tap, tap + tap_step, ... The first tap reads source at the
// first position, source_step further at each next one; each next tap reads tap_source further.
struct Run {
    int first, step, count, source, source_step, tap, tap_step, taps, tap_source;
    Run part(int from, int most) const {
        Run some = *this;
        some.first += from * step;
        some.source += from * source_step;
        some.count = std::min(count - from, most);
        return some;
    }
};

inline std::vector<Run> runs_of(const Axis& a) {
    std::vector<Run> runs;
    for (int phase = 0; phase < std::min(a.down, a.outputs); ++phase) {
        Run all{phase, a.down, 0, 0, a.up, 0, 1, 0, 0};  // with the taps that read whole positions
        for (int k = 0; k < a.kernel; ++k) {
            const int source = phase * a.up + a.shift + k * a.tap;
            if (source % a.down) continue;
            if (all.taps == 0) all.tap = k, all.source = source / a.down;
            if (all.taps == 1) all.tap_step = k - all.tap, all.tap_source = source / a.down - all.source;
            ++all.taps;
        }
        int low_before = -1, high_before = -1;
        for (int x = phase; x < a.outputs; x += a.down, all.source += a.up) {
            const auto outside = [&](int i) {
                const int source = all.source + i * all.tap_source;
                return source < 0 || source >= a.inputs;
            };
            int low = 0, high = all.taps;
            while (low < high && outside(low)) ++low;
            while (low < high && outside(high - 1)) --high;
            if (low != low_before || high != high_before)
                runs.push_back({x, a.down, 0, all.source + low * all.tap_source, a.up, all.tap + low * all.tap_step,
                                all.tap_step, high - low, all.tap_source});
            ++runs.back().count;
            low_before = low, high_before = high;
        }
    }
    return runs;
}

// -- sums over inputs and taps -----------------------------------------------------------------------------------------

struct Distances {  // in numbers
    int64_t channel, row, column;
};

// out[o] = bias[o] + sum of weight[o][c][tap] * in[c], each at the place of the tap. The weights stay where they are: the
// vectors are along the lanes, so each is broadcast from its place.
template <class T> struct Sums {
    const T *in, *weight, *bias;
    T* out;
    int inputs, outputs;
    Distances from, to;
    int64_t weight_output, weight_input, weight_row;
    int lanes, stride;
    bool add = false;  // to what `out` holds
};

template <class T> inline wide<T> keep_lanes(wide<T> value, int lanes_left) {
    wide<T> lane;
    for (int i = 0; i < width<T>(); ++i) lane[i] = T(i);
    return lane < T(lanes_left) ? value : wide<T>{};
}

// Not inline: it is needed for few vectors, and would keep the sums of `block` from staying in registers.
template <class T> __attribute__((noinline)) void put_lanes(T* to, wide<T> value, int lanes_left, bool add) {
    if (!add) return store<T>(to, keep_lanes<T>(value, lanes_left));
    T part[width<T>()];
    store<T>(part, value);
    for (int i = 0; i < lanes_left && i < width<T>(); ++i) to[i] += part[i];
}

struct Spot {  // one vector: where its sources begin, where it goes, how many of its lanes are examples
    int64_t from, to;
    int lanes;
};

struct Step {  // from one tap to the next, in the input and in the weights
    int64_t from, weight;
};

// From each tap of two runs to the next one, and from the last tap to the first one of the next input.
template <class T> void steps_of(const Sums<T>& s, const Run& y, const Run& x, std::vector<Step>& steps) {
    steps.clear();
    const Step right{x.tap_source * s.from.column, x.tap_step};
    const Step down{y.tap_source * s.from.row, y.tap_step * s.weight_row};
    for (int ky = 0; ky < y.taps && x.taps; ++ky) {
        for (int kx = 0; kx + 1 < x.taps; ++kx) steps.push_back(right);
        const int64_t back = x.taps - 1, up = y.taps - 1;
        if (ky + 1 < y.taps) steps.push_back({down.from - back * right.from, down.weight - back * right.weight});
        else steps.push_back({s.from.channel - back * right.from - up * down.from,
                              s.weight_input - back * right.weight - up * down.weight});
    }
}

// One loop over inputs and taps: nested ones are too short for the processor to foresee their ends.
template <class T, int OS, int VS>
void block(const Sums<T>& s, const Step* steps, int taps, const Spot* spots, const T* w, int o) {
    wide<T> sum[OS][VS];
ESPER_UNROLL
    for (int i = 0; i < OS; ++i)
ESPER_UNROLL
        for (int v = 0; v < VS; ++v) sum[i][v] = wide<T>{} + (s.bias ? s.bias[o + i] : T(0));
    int64_t apart[VS];
ESPER_UNROLL
    for (int v = 0; v < VS; ++v) apart[v] = spots[v].from - spots[0].from;
    const int64_t next = s.weight_output;
    const T *h = s.in + spots[0].from, *third[3];  // few registers hold the addresses of the weights
ESPER_UNROLL
    for (int i = 0; i < 3; ++i) third[i] = w + (o + 3 * i) * next;
    const Step *step = steps, *end = steps + taps;
    for (int left = s.inputs * taps; left > 0; --left) {
        wide<T> here[VS];
ESPER_UNROLL
        for (int v = 0; v < VS; ++v) here[v] = load(h + apart[v]);
ESPER_UNROLL
        for (int i = 0; i < OS; ++i)
ESPER_UNROLL
            for (int v = 0; v < VS; ++v) sum[i][v] += third[i / 3][i % 3 * next] * here[v];
        h += step->from;
ESPER_UNROLL
        for (int i = 0; i < 3; ++i) third[i] += step->weight;
        ++step;
        step = step == end ? steps : step;
    }
    bool whole = true;
ESPER_UNROLL
    for (int v = 0; v < VS; ++v) whole &= spots[v].lanes >= width<T>();
    T* to = s.out + o * s.to.channel;
ESPER_UNROLL
    for (int i = 0; i < OS; ++i, to += s.to.channel)
ESPER_UNROLL
        for (int v = 0; v < VS; ++v) {
            T* at = to + spots[v].to;
            if (whole) store<T>(at, s.add ? load(at) + sum[i][v] : sum[i][v]);
            else put_lanes<T>(at, sum[i][v], spots[v].lanes, s.add);
        }
}

constexpr int SPOTS = 6;  // vectors for which all outputs follow each other, if the weights stay in the first cache

template <class T, int OS>
void blocks_of(const Sums<T>& s, const std::vector<Step>& steps, const Spot* spots, int count, const T* w, int o) {
    constexpr int VS = OS == SUMS ? 3 : SUMS == 8 ? 6 : 4;
    while (count) {
        const int done = count >= VS && !(VS == 3 && count == 4) ? VS : count >= 2 ? 2 : 1;
        if (done == VS) block<T, OS, VS>(s, steps.data(), steps.size(), spots, w, o);
        else if (done == 2) block<T, OS, 2>(s, steps.data(), steps.size(), spots, w, o);
        else block<T, OS, 1>(s, steps.data(), steps.size(), spots, w, o);
        spots += done, count -= done;
    }
}

// Outputs from `first` to `last`.
template <class T>
void blocks(const Sums<T>& s, const std::vector<Step>& steps, const Spot* spots, int count, const T* w, int first, int last) {
    for (int o = first; o < last;) {
        const int left = last - o;
        if (left >= SUMS) blocks_of<T, SUMS>(s, steps, spots, count, w, o), o += SUMS;
        else if (left >= SUMS / 2) blocks_of<T, SUMS / 2>(s, steps, spots, count, w, o), o += SUMS / 2;
        else if (left >= 2) blocks_of<T, 2>(s, steps, spots, count, w, o), o += 2;
        else blocks_of<T, 1>(s, steps, spots, count, w, o), ++o;
    }
}

// The same at the positions of two runs.
template <class T>
void rectangle(const Sums<T>& s, const Run& y, const Run& x, const std::vector<Step>& steps, int first, int last) {
    const int per = s.stride / width<T>(), vectors = y.count * x.count * per;
    const int parts = (vectors + SPOTS - 1) / SPOTS, most = (vectors + parts - 1) / parts;
    const T* w = s.weight + y.tap * s.weight_row + x.tap;
    int i = 0, j = 0, v = 0;
    Spot spots[SPOTS];
    for (int done = 0; done < vectors; done += most) {
        const int count = std::min(most, vectors - done);
        for (int k = 0; k < count; ++k) {
            spots[k] = {(y.source + i * y.source_step) * s.from.row + (x.source + j * x.source_step) * s.from.column +
                            v * width<T>(),
                        (y.first + i * y.step) * s.to.row + (x.first + j * x.step) * s.to.column + v * width<T>(),
                        s.lanes - v * width<T>()};
            if (++v < per) continue;
            v = 0;
            if (++j < x.count) continue;
            j = 0, ++i;
        }
        blocks(s, steps, spots, count, w, first, last);
    }
}

// Parts of the image whose inputs stay in the second cache. Weights that exceed the first cache: all positions of a part
// with some outputs before the next outputs.
template <class T> void sums_of_group(const Sums<T>& s, const std::vector<Run>& rows, const std::vector<Run>& columns) {
    std::vector<Step> steps;
    int taps_h = 1, taps_w = 1, wide_most = 0;
    for (const Run& y : rows) taps_h = std::max(taps_h, y.taps);
    for (const Run& x : columns) taps_w = std::max(taps_w, x.taps), wide_most = std::max(wide_most, x.count);
    const int64_t weights = int64_t(s.outputs) * s.inputs * taps_h * taps_w * sizeof(T);
    const int group = 2 * weights > FIRST_CACHE ? SUMS : s.outputs;
    const int64_t positions = SECOND_CACHE / (int64_t(s.inputs) * s.stride * sizeof(T));
    const int most_columns = std::max<int64_t>(4, std::min<int64_t>(wide_most, positions / taps_h));
    const int most_rows = std::max<int64_t>(1, positions / most_columns - taps_h + 1);
    for (const Run& y : rows)
        for (int i = 0; i < y.count; i += most_rows)
            for (const Run& x : columns) {
                steps_of(s, y, x, steps);
                for (int j = 0; j < x.count; j += most_columns)
                    for (int o = 0; o < s.outputs; o += group)
                        rectangle(s, y.part(i, most_rows), x.part(j, most_columns), steps, o,
                                  std::min(o + group, s.outputs));
            }
}

// -- one input per output ----------------------------------------------------------------------------------------------

// Positions that have the same taps, with the places of the taps in the input and in the weights.
struct Rectangle {
    Run y, x;
    std::vector<int64_t> from, weight;
};

inline std::vector<Rectangle> rectangles_of(const std::vector<Run>& rows, const std::vector<Run>& columns,
                                            const Distances& from, int64_t weight_row) {
    std::vector<Rectangle> found;
    for (const Run& y : rows)
        for (const Run& x : columns) {
            found.push_back({y, x, {}, {}});
            for (int ky = 0; ky < y.taps; ++ky)
                for (int kx = 0; kx < x.taps; ++kx) {
                    found.back().from.push_back((y.source + ky * y.tap_source) * from.row +
                                                (x.source + kx * x.tap_source) * from.column);
                    found.back().weight.push_back((y.tap + ky * y.tap_step) * weight_row + x.tap + kx * x.tap_step);
                }
        }
    return found;
}

struct Strip {  // vectors of a row, evenly spaced; the first one holds the lanes from `lane` on
    int64_t from, to, from_next, to_next;
    int count, lane;
};

template <class Body>
void each_strip(const Rectangle& r, const Distances& from, const Distances& to, int vector, int stride, Body body) {
    const int64_t from_next = r.x.source_step * from.column, to_next = r.x.step * to.column;
    const bool joined = from_next == stride && to_next == stride;
    for (int i = 0; i < r.y.count; ++i) {
        const int64_t begin = i * r.y.source_step * from.row;
        const int64_t end = (r.y.first + i * r.y.step) * to.row + r.x.first * to.column;
        if (joined) body(Strip{begin, end, vector, vector, r.x.count * stride / vector, 0});
        else
            for (int lane = 0; lane < stride; lane += vector)
                body(Strip{begin + lane, end + lane, from_next, to_next, r.x.count, lane});
    }
}

// The next VS vectors of a strip.
template <class T, int VS>
inline void channel_block(const T* h, T* to, const Strip& strip, const int64_t* from, const T* factor, int taps, T bias) {
    wide<T> sum[VS];
ESPER_UNROLL
    for (int v = 0; v < VS; ++v) sum[v] = wide<T>{} + bias;
    for (int i = 0; i < taps; ++i)
ESPER_UNROLL
        for (int v = 0; v < VS; ++v) sum[v] += factor[i] * load(h + from[i] + v * strip.from_next);
ESPER_UNROLL
    for (int v = 0; v < VS; ++v) store<T>(to + v * strip.to_next, sum[v]);
}

template <class T> void channelwise(const Sums<T>& s, const std::vector<Rectangle>& rectangles, int groups) {
    std::vector<T> factor;
    for (const Rectangle& r : rectangles)
        for (int o = 0; o < groups * s.outputs; ++o) {
            const int taps = r.from.size();
            const T bias = s.bias ? s.bias[o] : T(0), *h_channel = s.in + o / s.outputs * s.from.channel;
            T* to_channel = s.out + o * s.to.channel;
            factor.clear();
            for (int64_t place : r.weight) factor.push_back(s.weight[o * s.weight_output + place]);
            each_strip(r, s.from, s.to, width<T>(), s.stride, [&](const Strip& strip) {
                const T* h = h_channel + strip.from;
                T* to = to_channel + strip.to;
                for (int left = strip.count; left > 0;) {
                    const auto next = [&](auto block, int done) {
                        block(h, to, strip, r.from.data(), factor.data(), taps, bias);
                        h += done * strip.from_next, to += done * strip.to_next, left -= done;
                    };
                    if (left >= 8) next(channel_block<T, 8>, 8);
                    else if (left >= 4) next(channel_block<T, 4>, 4);
                    else if (left >= 2) next(channel_block<T, 2>, 2);
                    else next(channel_block<T, 1>, 1);
                }
                if (s.lanes == s.stride) return;
                for (int k = 0; k < strip.count; ++k) {
                    T* vector = to_channel + strip.to + k * strip.to_next;
                    const int lane = strip.from_next == width<T>() ? k * width<T>() % s.stride : strip.lane;
                    if (lane + width<T>() > s.lanes) store<T>(vector, keep_lanes<T>(load(vector), s.lanes - lane));
                }
            });
        }
}

template <class T>
void sums(Sums<T> s, const std::vector<Run>& rows, const std::vector<Run>& columns, int groups, int64_t weights) {
    if (s.inputs == 1 && s.outputs < SUMS / 2)
        return channelwise(s, rectangles_of(rows, columns, s.from, s.weight_row), groups);
    for (int g = 0; g < groups; ++g) {
        sums_of_group(s, rows, columns);
        s.in += s.inputs * s.from.channel, s.out += s.outputs * s.to.channel, s.weight += weights;
        if (s.bias) s.bias += s.outputs;
    }
}

// -- convolutions and products -----------------------------------------------------------------------------------------

constexpr int DEPTH = 256;  // examples at a time for the gradients of the weights of products

// Of the input and of the output.
inline Distances distances(int height, int width, int stride) {
    return {int64_t(height) * width * stride, int64_t(width) * stride, stride};
}

inline std::vector<Run> positions_of(int count) { return {{0, 1, count, 0, 1, 0, 1, 1, 0}}; }

inline int64_t product_scratch(const Product& p) { return int64_t(DEPTH) * (p.inputs + 64); }

inline int64_t convolution_scratch(const Shape& s) {
    return std::max(int64_t(DEPTH) * (s.inputs / s.groups + 64), 16 * (int64_t(s.kernel_h) * s.kernel_w + 16));
}

template <class T>
void convolve(const Shape& s, const T* in, const T* weight, const T* bias, T* out, int lanes, int stride, T*) {
    const int inputs = s.inputs / s.groups, outputs = s.outputs / s.groups, taps = s.kernel_h * s.kernel_w;
    sums<T>({in, weight, bias, out, inputs, outputs, distances(s.height, s.width, stride),
             distances(s.out_height, s.out_width, stride), int64_t(inputs) * taps, taps, s.kernel_w, lanes, stride},
            runs_of({s.out_height, s.height, s.kernel_h, s.stride_h, 1, -s.pad_top, s.dilation_h}),
            runs_of({s.out_width, s.width, s.kernel_w, s.stride_w, 1, -s.pad_left, s.dilation_w}), s.groups,
            int64_t(outputs) * inputs * taps);
}

template <class T>
void convolve_input_grad(const Shape& s, const T* grad_out, const T* weight, T* grad_in, int lanes, int stride, T*) {
    const int inputs = s.inputs / s.groups, outputs = s.outputs / s.groups, taps = s.kernel_h * s.kernel_w;
    sums<T>({grad_out, weight, nullptr, grad_in, outputs, inputs, distances(s.out_height, s.out_width, stride),
             distances(s.height, s.width, stride), taps, int64_t(inputs) * taps, s.kernel_w, lanes, stride},
            runs_of({s.height, s.out_height, s.kernel_h, 1, s.stride_h, s.pad_top, -s.dilation_h}),
            runs_of({s.width, s.out_width, s.kernel_w, 1, s.stride_w, s.pad_left, -s.dilation_w}), s.groups,
            int64_t(outputs) * inputs * taps);
}

template <class T>
void multiply(const Product& p, const T* in, const T* weight, const T* bias, T* out, int lanes, int stride, T*) {
    sums_of_group<T>({in, weight, bias, out, p.inputs, p.outputs, {stride, 0, int64_t(p.inputs) * stride},
                      {stride, 0, int64_t(p.outputs) * stride}, p.inputs, 1, 0, lanes, stride},
                     positions_of(1), positions_of(p.positions));
}

template <class T>
void multiply_input_grad(const Product& p, const T* grad_out, const T* weight, T* grad_in, int lanes, int stride, T*) {
    sums_of_group<T>({grad_out, weight, nullptr, grad_in, p.outputs, p.inputs, {stride, 0, int64_t(p.outputs) * stride},
                      {stride, 0, int64_t(p.inputs) * stride}, 1, p.inputs, 0, lanes, stride},
                     positions_of(1), positions_of(p.positions));
}

// -- gradients of weights ----------------------------------------------------------------------------------------------

// Totals of N vectors: halves of pairs are added until the vectors are through, so that many totals cost few shuffles.
template <class T> inline wide<T> add_pairs(wide<T> a, wide<T> b) {
    decltype(a < b) even;
    for (int i = 0; i < width<T>(); ++i) even[i] = 2 * i;
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

template <class T, int N> inline void totals(const wide<T>* sum, T* to) {
    constexpr int W = width<T>(), GROUPS = (N + W - 1) / W;
    for (int group = 0; group < GROUPS; ++group) {
        wide<T> part[W];
ESPER_UNROLL
        for (int i = 0; i < W; ++i) part[i] = group * W + i < N ? sum[group * W + i] : wide<T>{};
        for (int half = W / 2; half > 0; half /= 2)
            for (int i = 0; i < half; ++i) part[i] = add_pairs<T>(part[2 * i], part[2 * i + 1]);
        store<T>(to + group * W, part[0]);
    }
}

struct Span {  // of positions of an axis
    int first, last;
};

// Positions of the span whose source, `shift` from its place, is inside.
inline Span inside(Span all, int step, int shift, int size) {
    while (all.first < all.last && all.first * step + shift < 0) ++all.first;
    while (all.first < all.last && (all.last - 1) * step + shift >= size) --all.last;
    return all;
}

template <class T> struct WeightGrad {  // of one group
    const T *in, *grad_out;
    T* grad;
    int inputs, outputs;
    Distances from, to;
    int stride;
};

// Products of outputs and inputs, over a part of the image, for one tap.
template <class T, int OS, int CS>
void tap_tile(const Shape& s, const WeightGrad<T>& k, int o, int c, Span y, Span x, int ky, int kx) {
    const int top = ky * s.dilation_h - s.pad_top, left = kx * s.dilation_w - s.pad_left;
    y = inside(y, s.stride_h, top, s.height), x = inside(x, s.stride_w, left, s.width);
    int64_t g_next = k.to.column, h_next = s.stride_w * k.from.column;
    int count = x.last - x.first, stride = k.stride;
    if (g_next == stride && h_next == stride)
        count *= stride / width<T>(), g_next = h_next = stride = width<T>();  // one row of vectors
    wide<T> sum[OS][CS] = {};
    for (int i = y.first; i < y.last; ++i)
        for (int lane = 0; lane < stride; lane += width<T>()) {
            const T* g = k.grad_out + o * k.to.channel + i * k.to.row + x.first * k.to.column + lane;
            const T* h = k.in + c * k.from.channel + (i * s.stride_h + top) * k.from.row +
                         (x.first * s.stride_w + left) * k.from.column + lane;
            for (int left = count; left > 0; --left, g += g_next, h += h_next) {
                wide<T> here[CS];
ESPER_UNROLL
                for (int j = 0; j < CS; ++j) here[j] = load(h + j * k.from.channel);
ESPER_UNROLL
                for (int n = 0; n < OS; ++n) {
                    const wide<T> to = load(g + n * k.to.channel);
ESPER_UNROLL
                    for (int j = 0; j < CS; ++j) sum[n][j] += to * here[j];
                }
            }
        }
    T total[OS * CS + width<T>()];
    totals<T, OS * CS>(&sum[0][0], total);
    T* grad = k.grad + ((int64_t(o) * k.inputs + c) * s.kernel_h + ky) * s.kernel_w + kx;
    const int64_t taps = s.kernel_h * s.kernel_w;
ESPER_UNROLL
    for (int n = 0; n < OS; ++n)
ESPER_UNROLL
        for (int j = 0; j < CS; ++j) grad[(n * k.inputs + j) * taps] += total[n * CS + j];
}

// The same for row `ky` of a kernel of three neighbours, which slide along a row of the image: each is loaded once.
template <class T, int OS, int CS>
void row_tile(const Shape& s, const WeightGrad<T>& k, int o, int c, Span y, Span x, int ky) {
    const int top = ky * s.dilation_h - s.pad_top;
    y = inside(y, s.stride_h, top, s.height);
    wide<T> sum[OS][CS][3] = {};
    for (int i = y.first; i < y.last; ++i)
        for (int lane = 0; lane < k.stride; lane += width<T>()) {
            int column = x.first - s.pad_left;  // of the left neighbour
            const T* g = k.grad_out + o * k.to.channel + i * k.to.row + x.first * k.to.column + lane;
            const T* h = k.in + c * k.from.channel + (i * s.stride_h + top) * k.from.row + column * k.from.column + lane;
            const auto neighbour = [&](int dx, int j) {
                const bool there = unsigned(column + dx) < unsigned(s.width);
                return there ? load(h + dx * k.from.column + j * k.from.channel) : wide<T>{};
            };
            wide<T> left[CS], here[CS], right[CS];
ESPER_UNROLL
            for (int j = 0; j < CS; ++j) left[j] = neighbour(0, j), here[j] = neighbour(1, j);
            for (int count = x.last - x.first; count > 0; --count, ++column, g += k.to.column, h += k.from.column) {
ESPER_UNROLL
                for (int j = 0; j < CS; ++j) right[j] = neighbour(2, j);
ESPER_UNROLL
                for (int n = 0; n < OS; ++n) {
                    const wide<T> to = load(g + n * k.to.channel);
ESPER_UNROLL
                    for (int j = 0; j < CS; ++j) {
                        sum[n][j][0] += to * left[j];
                        sum[n][j][1] += to * here[j];
                        sum[n][j][2] += to * right[j];
                    }
                }
ESPER_UNROLL
                for (int j = 0; j < CS; ++j) left[j] = here[j], here[j] = right[j];
            }
        }
    T total[OS * CS * 3 + width<T>()];
    totals<T, OS * CS * 3>(&sum[0][0][0], total);
ESPER_UNROLL
    for (int n = 0; n < OS; ++n)
ESPER_UNROLL
        for (int j = 0; j < CS; ++j)
            for (int kx = 0; kx < 3; ++kx)
                k.grad[((int64_t(o + n) * k.inputs + c + j) * s.kernel_h + ky) * 3 + kx] += total[(n * CS + j) * 3 + kx];
}

template <class T, int OS, int CS>
void tile(const Shape& s, const WeightGrad<T>& k, int o, int c, Span y, Span x) {
    for (int ky = 0; ky < s.kernel_h; ++ky) {
        if constexpr (CS <= REGISTERS / 16)
            if (s.kernel_w == 3 && s.stride_w == 1 && s.dilation_w == 1) {
                row_tile<T, OS, CS>(s, k, o, c, y, x, ky);
                continue;
            }
        for (int kx = 0; kx < s.kernel_w; ++kx) tap_tile<T, OS, CS>(s, k, o, c, y, x, ky, kx);
    }
}

template <class T, int OS> void tiles(const Shape& s, const WeightGrad<T>& k, int o, Span y, Span x) {
    const bool rows = s.kernel_w == 3 && s.stride_w == 1 && s.dilation_w == 1;
    const int most = rows ? REGISTERS / 16 : REGISTERS == 32 ? 4 : 3;
    for (int c = 0, done; c < k.inputs; c += done) {
        done = std::min(most, k.inputs - c);
        if (done == 4) tile<T, OS, 4>(s, k, o, c, y, x);
        else if (done == 3) tile<T, OS, 3>(s, k, o, c, y, x);
        else if (done == 2) tile<T, OS, 2>(s, k, o, c, y, x);
        else tile<T, OS, 1>(s, k, o, c, y, x);
    }
}

// Parts of the image of which the features of a tile stay in the first cache.
template <class T> void weight_grad(const Shape& s, const WeightGrad<T>& k) {
    const int64_t positions = FIRST_CACHE / (8 * int64_t(k.stride) * sizeof(T));
    const int columns = std::max<int64_t>(2, std::min<int64_t>(positions, s.out_width));
    const int rows = std::max<int64_t>(1, positions / columns);
    for (int top = 0; top < s.out_height; top += rows)
        for (int left = 0; left < s.out_width; left += columns) {
            const Span y{top, std::min(top + rows, s.out_height)}, x{left, std::min(left + columns, s.out_width)};
            for (int o = 0; o < k.outputs;) {
                if (k.outputs - o >= 4) tiles<T, 4>(s, k, o, y, x), o += 4;
                else if (k.outputs - o >= 2) tiles<T, 2>(s, k, o, y, x), o += 2;
                else tiles<T, 1>(s, k, o, y, x), ++o;
            }
        }
}

// Rows and columns of a square of numbers trade places.
template <class T, int STEP = 1> inline void transpose_square(wide<T>* row) {
    if constexpr (STEP < width<T>()) {
        decltype(row[0] < row[0]) low, high;
        for (int i = 0; i < width<T>(); ++i) {
            low[i] = i & STEP ? width<T>() + i - STEP : i;
            high[i] = i & STEP ? width<T>() + i : i + STEP;
        }
        for (int i = 0; i < width<T>(); ++i)
            if (!(i & STEP)) {
                const wide<T> a = row[i], b = row[i + STEP];
                row[i] = __builtin_shuffle(a, b, low), row[i + STEP] = __builtin_shuffle(a, b, high);
            }
        transpose_square<T, STEP * 2>(row);
    }
}

// Kernels of one number. Vectors along the inputs, so that nothing is summed over the lanes of a vector: examples are
// what is summed over, as inputs are in `block`. The inputs are transposed to `scratch`: [some vectors][example][vector].
template <class T>
void product_weight_grad(const Shape& s, const WeightGrad<T>& k, int lanes, T* scratch) {
    constexpr int W = width<T>();
    const int vectors = (k.inputs + W - 1) / W, panels = (vectors + 2) / 3, all = s.out_height * s.out_width;
    for (int begin = 0; begin < lanes; begin += DEPTH) {
        const int count = std::min(DEPTH, lanes - begin), most = DEPTH / count;
        std::vector<Step> steps(count, Step{0, 1});
        steps.back().weight = k.to.column - (count - 1);
        for (int first = 0; first < all; first += most) {
            const int positions = std::min(most, all - first);
            for (int panel = 0, v = 0; panel < panels; ++panel) {
                const int wide_by = vectors / panels + (panel < vectors % panels), c = v * W;
                for (int p = 0; p < positions; ++p) {
                    const int at = first + p;
                    const T* h = k.in + at / s.out_width * s.stride_h * k.from.row +
                                 at % s.out_width * s.stride_w * k.from.column + begin;
                    for (int u = 0; u < wide_by; ++u)
                        for (int lane = 0; lane < count; lane += W) {
                            wide<T> row[W];
ESPER_UNROLL
                            for (int i = 0; i < W; ++i)
                                row[i] = c + u * W + i < k.inputs ? load(h + (c + u * W + i) * k.from.channel + lane) : wide<T>{};
                            transpose_square<T>(row);
                            T* to = scratch + ((int64_t(p) * count + lane) * wide_by + u) * W;
                            for (int i = 0; i < W && lane + i < count; ++i) store<T>(to + i * wide_by * W, row[i]);
                        }
                }
                Spot spots[3];
                for (int u = 0; u < wide_by; ++u) spots[u] = {u * W, c + u * W, k.inputs - c - u * W};
                for (Step& step : steps) step.from = wide_by * W;
                const T* g = k.grad_out + first * k.to.column + begin;
                const Sums<T> sums{scratch, g, nullptr, k.grad, positions, k.outputs, {}, {k.inputs, 0, 0},
                                   k.to.channel, 0, 0, 0, 0, true};
                blocks(sums, steps, spots, wide_by, g, 0, k.outputs);
                v += wide_by;
            }
        }
    }
}

// The next products of a strip for N taps: U vectors at a time, so that additions need not wait for each other.
template <class T, int N, int U>
inline void channel_sums(const T* h, const T* g, const Strip& strip, const int64_t* from, const int64_t* weight, T* sums) {
    wide<T> sum[U][N] = {};
    const auto add = [&](int u) {
        const wide<T> to = load(g);
ESPER_UNROLL
        for (int i = 0; i < N; ++i) sum[u][i] += to * load(h + from[i]);
        h += strip.from_next, g += strip.to_next;
    };
    int left = strip.count;
    for (; left >= U; left -= U)
ESPER_UNROLL
        for (int u = 0; u < U; ++u) add(u);
    for (; left > 0; --left) add(0);
ESPER_UNROLL
    for (int i = 0; i < N; ++i) {
ESPER_UNROLL
        for (int u = 1; u < U; ++u) sum[0][i] += sum[u][i];
        T* to = sums + weight[i] * width<T>();
        store<T>(to, load(to) + sum[0][i]);
    }
}

template <class T>
void channelwise_weight_grad(const Shape& s, const WeightGrad<T>& k, const std::vector<Rectangle>& rectangles, T* sums) {
    constexpr int W = width<T>();
    const int taps = s.kernel_h * s.kernel_w;
    for (int o = 0; o < s.outputs; ++o) {
        std::memset(sums, 0, sizeof(T) * W * ((taps + W - 1) / W * W));
        const T *h = k.in + o / k.outputs * k.from.channel, *g = k.grad_out + o * k.to.channel;
        for (const Rectangle& r : rectangles)
            each_strip(r, k.from, k.to, W, k.stride, [&](const Strip& strip) {
                const int64_t *from = r.from.data(), *weight = r.weight.data();
                const int count = r.from.size();
                for (int i = 0; i < count;) {
                    const auto next = [&](auto sum, int done) {
                        sum(h + strip.from, g + strip.to, strip, from + i, weight + i, sums);
                        i += done;
                    };
                    if (count - i >= 9) next(channel_sums<T, 9, 1>, 9);
                    else if (count - i >= 3) next(channel_sums<T, 3, 3>, 3);
                    else next(channel_sums<T, 1, 8>, 1);
                }
            });
        for (int i = 0; i < taps; i += W) {
            wide<T> part[W];
            T total[W];
ESPER_UNROLL
            for (int j = 0; j < W; ++j) part[j] = load(sums + (i + j) * W);
            totals<T, W>(part, total);
            for (int j = 0; j < W && i + j < taps; ++j) k.grad[o * taps + i + j] += total[j];
        }
    }
}

template <class T> void bias_grad(const WeightGrad<T>& k, int outputs, int positions, T* grad) {
    const bool joined = k.to.column == k.stride;
    const int rows = joined ? 1 : positions, length = joined ? positions * k.stride : k.stride;
    for (int o = 0; o < outputs; ++o) {
        wide<T> sum[4] = {};
        for (int m = 0; m < rows; ++m) {
            const T* g = k.grad_out + o * k.to.channel + m * k.to.column;
            int at = 0;
            for (; at + 4 * width<T>() <= length; at += 4 * width<T>())
ESPER_UNROLL
                for (int v = 0; v < 4; ++v) sum[v] += load(g + at + v * width<T>());
            for (; at < length; at += width<T>()) sum[0] += load(g + at);
        }
        grad[o] += total<T>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}

template <class T>
void convolve_weight_grad(const Shape& s, const T* in, const T* grad_out, T* grad, T* grad_bias, int lanes, int stride,
                          T* scratch) {
    const int inputs = s.inputs / s.groups, outputs = s.outputs / s.groups, taps = s.kernel_h * s.kernel_w;
    WeightGrad<T> k{in, grad_out, grad, inputs, outputs, distances(s.height, s.width, stride),
                    distances(s.out_height, s.out_width, stride), stride};
    if (grad_bias) bias_grad(k, s.outputs, s.out_height * s.out_width, grad_bias);
    if (inputs == 1 && outputs < 4) {
        const auto rows = runs_of({s.out_height, s.height, s.kernel_h, s.stride_h, 1, -s.pad_top, s.dilation_h});
        const auto columns = runs_of({s.out_width, s.width, s.kernel_w, s.stride_w, 1, -s.pad_left, s.dilation_w});
        return channelwise_weight_grad(s, k, rectangles_of(rows, columns, k.from, s.kernel_w), scratch);
    }
    // nothing beyond the image is read, and the vectors along the inputs are nearly full
    const int full = (inputs + width<T>() - 1) / width<T>() * width<T>();
    const bool product = taps == 1 && s.pad_top == 0 && s.pad_left == 0 && 4 * inputs >= 3 * full &&
                         (s.out_height - 1) * s.stride_h < s.height && (s.out_width - 1) * s.stride_w < s.width;
    for (int g = 0; g < s.groups; ++g) {
        if (product) product_weight_grad(s, k, lanes, scratch);
        else weight_grad(s, k);
        k.in += inputs * k.from.channel, k.grad_out += outputs * k.to.channel;
        k.grad += int64_t(outputs) * inputs * taps;
    }
}

template <class T>
void multiply_weight_grad(const Product& p, const T* in, const T* grad_out, T* grad, T* grad_bias, int lanes, int stride,
                          T* scratch) {
    const Shape s{p.inputs, p.outputs, 1, 1, p.positions, 1, p.positions, 1, 1, 1, 1, 0, 0, 1, 1};
    const WeightGrad<T> k{in, grad_out, grad, p.inputs, p.outputs, {stride, 0, int64_t(p.inputs) * stride},
                          {stride, 0, int64_t(p.outputs) * stride}, stride};
    product_weight_grad(s, k, lanes, scratch);
    if (grad_bias) bias_grad(k, p.outputs, p.positions, grad_bias);
}

// -- instructions: n = {the numbers of Shape or Product} ----------------------------------------------------------------

inline Shape shape_of(const int32_t* n) {
    return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14]};
}
inline Product product_of(const int32_t* n) { return {n[0], n[1], n[2]}; }

template <class T> void run_CONVOLVE(const Call<T>& c) {
    convolve<T>(shape_of(c.n), c.p[0], c.p[1], c.p[2], c.p[3], c.chunk.lanes, c.chunk.stride, c.p[4]);
}
template <class T> void run_CONVOLVE_INPUT_GRAD(const Call<T>& c) {
    convolve_input_grad<T>(shape_of(c.n), c.p[0], c.p[1], c.p[2], c.chunk.lanes, c.chunk.stride, c.p[3]);
}
template <class T> void run_CONVOLVE_WEIGHT_GRAD(const Call<T>& c) {
    convolve_weight_grad<T>(shape_of(c.n), c.p[0], c.p[1], c.p[2], c.p[3], c.chunk.lanes, c.chunk.stride, c.p[4]);
}
template <class T> void run_MULTIPLY(const Call<T>& c) {
    multiply<T>(product_of(c.n), c.p[0], c.p[1], c.p[2], c.p[3], c.chunk.lanes, c.chunk.stride, c.p[4]);
}
template <class T> void run_MULTIPLY_INPUT_GRAD(const Call<T>& c) {
    multiply_input_grad<T>(product_of(c.n), c.p[0], c.p[1], c.p[2], c.chunk.lanes, c.chunk.stride, c.p[3]);
}
template <class T> void run_MULTIPLY_WEIGHT_GRAD(const Call<T>& c) {
    multiply_weight_grad<T>(product_of(c.n), c.p[0], c.p[1], c.p[2], c.p[3], c.chunk.lanes, c.chunk.stride, c.p[4]);
}

}  // namespace esper
