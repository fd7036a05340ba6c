// The network of a host as a list of instructions, and the loop that carries them out for many hosts.
//
// Who reads them is here; who writes them is assembler.py, which knows the same names in the same order. An operand is
// a place in one of the spaces of a host (its weights, their gradients, a batch, working memory), so that hosts of
// equal structure share one list. Nothing is allocated, and a host reads and writes its own spaces alone: what it gets
// depends on no other host, and hosts may be run by several threads, each with working memory of its own.

#include "convolution.h"
#include "layers.h"
#include "optimizers.h"

#define ESPER_OPERATIONS(X)                                                                                        \
    X(TRANSPOSE) X(CONVOLVE) X(CONVOLVE_BACK) X(WEIGH) X(DEPTHWISE) X(DEPTHWISE_BACK) X(WEIGH_DEPTHWISE)            \
    X(BATCH_NORM) X(BATCH_NORM_BACK) X(BATCH_NORM_FIXED) X(GROUP_NORM) X(GROUP_NORM_BACK) X(MAX_POOL)               \
    X(MAX_POOL_BACK) X(MEAN) X(MEAN_BACK) X(ADD_BIAS) X(ADD_BIAS_BACK) X(SCALE) X(SCALE_BACK) X(MODULATE)           \
    X(MODULATE_BACK) X(SHIFT) X(SHIFT_BACK) X(ACTIVATE) X(ACTIVATE_BACK) X(JOIN) X(JOIN_BACK) X(CROSS_ENTROPY)     \
    X(SQUARE_NORM) X(CLIP) X(SGD) X(ADAMW)

namespace esper {

#define X(name) name,
enum Operation : int32_t { ESPER_OPERATIONS(X) };
#undef X

constexpr int SIZES = 6, NUMBERS_GIVEN = 5, OPERANDS = 10;

enum Space : int32_t { NOTHING = -1, ROWS = 0, NUMBERS = 1 };  // working memory: rows of lanes, and single numbers

struct Instruction {
    int32_t operation;
    int32_t flag;          // ReLU afterwards, the kind of activation, whether a seed is heard
    int32_t size[SIZES];
    double number[NUMBERS_GIVEN];  // epsilon, momentum; rates of an optimizer
    int32_t space[OPERANDS];
    int64_t offset[OPERANDS];  // rows in ROWS, elements elsewhere
};

template <class T> struct Host {
    const int64_t* base;
    int lanes, stride;
    T* scratch;  // weights in another order, or a few rows

    template <class U = T> U* at(const Instruction& i, int k) const {
        if (i.space[k] == NOTHING) return nullptr;
        const int64_t step = i.space[k] == ROWS ? stride : 1;
        return reinterpret_cast<U*>(base[i.space[k]]) + i.offset[k] * step;
    }

    Affine<T> affine(const Instruction& i, int k) const { return {at(i, k), at(i, k + 1)}; }

    Rates<T> rates(const Instruction& i) const {
        return {T(i.number[0]), T(i.number[1]), T(i.number[2]), T(i.number[3]), T(i.number[4])};
    }

    bool run(const Instruction& i) const {
        const int32_t* n = i.size;
        switch (i.operation) {
            case TRANSPOSE: transpose<T>(n[0], at(i, 0), at(i, 1), lanes, stride); return true;
            case CONVOLVE:
                convolve<T>({n[0], n[1], n[2], n[3], n[4]}, at(i, 0), at(i, 1), false, at(i, 2), lanes, stride, scratch);
                return true;
            case CONVOLVE_BACK:  // sizes as of the way forward
                convolve<T>({n[1], n[0], n[2], n[3], n[4]}, at(i, 0), at(i, 1), true, at(i, 2), lanes, stride, scratch);
                return true;
            case WEIGH: weigh<T>({n[0], n[1], n[2], n[3], n[4]}, at(i, 0), at(i, 1), at(i, 2), stride); return true;
            case DEPTHWISE:
                depthwise<T>({n[0], n[0], n[2], n[3], n[4]}, at(i, 0), at(i, 1), false, at(i, 2), lanes, stride);
                return true;
            case DEPTHWISE_BACK:
                depthwise<T>({n[0], n[0], n[2], n[3], n[4]}, at(i, 0), at(i, 1), true, at(i, 2), lanes, stride);
                return true;
            case WEIGH_DEPTHWISE:
                weigh_depthwise<T>({n[0], n[0], n[2], n[3], n[4]}, at(i, 0), at(i, 1), at(i, 2), stride);
                return true;
            case BATCH_NORM:
                batch_norm<T>(n[0], n[1], i.flag, T(i.number[0]), T(i.number[1]), at(i, 0), affine(i, 1), at(i, 3),
                              at(i, 4), at(i, 5), at(i, 6), at(i, 7), lanes, stride);
                return true;
            case BATCH_NORM_BACK:
                batch_norm_back<T>(n[0], n[1], i.flag, at(i, 0), at(i, 7), affine(i, 1), at(i, 3), at(i, 4), at(i, 8),
                                   at(i, 5), at(i, 6), lanes, stride);
                return true;
            case BATCH_NORM_FIXED:
                batch_norm_fixed<T>(n[0], n[1], i.flag, T(i.number[0]), at(i, 0), affine(i, 1), at(i, 3), at(i, 4),
                                    at(i, 5), lanes, stride);
                return true;
            case GROUP_NORM:
                group_norm<T>(n[0], n[1], n[2], i.flag, T(i.number[0]), at(i, 0), affine(i, 1), at(i, 3), at(i, 4),
                              at(i, 5), at(i, 6), lanes, stride);
                return true;
            case GROUP_NORM_BACK:
                group_norm_back<T>(n[0], n[1], n[2], i.flag, at(i, 0), affine(i, 1), at(i, 3), at(i, 4), at(i, 5),
                                   at(i, 6), at(i, 7), at(i, 8), at(i, 9), lanes, stride);
                return true;
            case MAX_POOL: max_pool<T>(n[0], n[1], n[2], at(i, 0), at(i, 1), lanes, stride); return true;
            case MAX_POOL_BACK:
                max_pool_back<T>(n[0], n[1], n[2], at(i, 0), at(i, 1), at(i, 2), lanes, stride);
                return true;
            case MEAN: mean_space<T>(n[0], n[1], at(i, 0), at(i, 1), stride); return true;
            case MEAN_BACK: mean_space_back<T>(n[0], n[1], at(i, 0), at(i, 1), lanes, stride); return true;
            case ADD_BIAS: add_bias<T>(n[0], n[1], at(i, 0), at(i, 1), lanes, stride); return true;
            case ADD_BIAS_BACK: add_bias_back<T>(n[0], n[1], at(i, 0), at(i, 1), lanes, stride); return true;
            case SCALE: scale<T>(n[0], n[1], at(i, 0), at(i, 1), at(i, 2), lanes, stride); return true;
            case SCALE_BACK:
                scale_back<T>(n[0], n[1], at(i, 0), at(i, 1), at(i, 2), at(i, 3), lanes, stride);
                return true;
            case MODULATE: modulate<T>(n[0], n[1], at(i, 0), at(i, 1), at(i, 2), lanes, stride); return true;
            case MODULATE_BACK: modulate_back<T>(n[0], n[1], at(i, 0), at(i, 1), at(i, 2), stride); return true;
            case SHIFT: shift<T>(n[0], at(i, 0), at(i, 1), at(i, 2), at(i, 3), lanes, stride); return true;
            case SHIFT_BACK:
                shift_back<T>(n[0], at(i, 0), at(i, 1), at(i, 2), at(i, 3), at(i, 4), lanes, stride);
                return true;
            case ACTIVATE: activate<T>(n[0], i.flag, at(i, 0), at(i, 1), lanes, stride); return true;
            case ACTIVATE_BACK: activate_back<T>(n[0], i.flag, at(i, 0), at(i, 1), at(i, 2), lanes, stride); return true;
            case JOIN:
                join<T>(n[0], n[1], at(i, 0), at(i, 1), at(i, 2), *at(i, 3), at(i, 4), lanes, stride);
                return true;
            case JOIN_BACK:
                join_back<T>(n[0], n[1], i.flag, at(i, 0), at(i, 1), at(i, 2), *at(i, 3), at(i, 4), at(i, 5), at(i, 6),
                             lanes, stride);
                return true;
            case CROSS_ENTROPY:
                cross_entropy<T>(n[0], at(i, 0), at<int64_t>(i, 1), at<double>(i, 2), at(i, 3), scratch, lanes, stride);
                return true;
            case SQUARE_NORM: square_norm<T>(n[0], at(i, 0), i.flag, at(i, 1)); return true;
            case CLIP: *at(i, 0) = clip_factor<T>(*at(i, 0), T(i.number[0])); return true;
            case SGD:
                sgd<T>(n[0], rates(i), *at(i, 0), at(i, 1), at(i, 2), at(i, 3), at(i, 4));
                return true;
            case ADAMW:
                adamw<T>(n[0], rates(i), *at(i, 0), at(i, 1), at(i, 2), at(i, 3), at(i, 4), at(i, 5), at<int64_t>(i, 6));
                return true;
        }
        return false;
    }
};

// Runs instructions first[h] to first[h] + count[h] for each host; base[h] are the addresses of its spaces. Returns the
// number of the first instruction that does not exist, or -1.
template <class T>
int64_t run(const Instruction* program, const int64_t* first, const int64_t* count, const int64_t* base, int64_t hosts,
            int64_t spaces, int64_t lanes, int64_t stride, void* scratch) {
    for (int64_t h = 0; h < hosts; ++h) {
        const Host<T> host{base + h * spaces, static_cast<int>(lanes), static_cast<int>(stride), static_cast<T*>(scratch)};
        for (int64_t i = first[h]; i < first[h] + count[h]; ++i)
            if (!host.run(program[i])) return i;
    }
    return -1;
}

}  // namespace esper

extern "C" {

int64_t esper_run_float(const esper::Instruction* program, const int64_t* first, const int64_t* count,
                        const int64_t* base, int64_t hosts, int64_t spaces, int64_t lanes, int64_t stride,
                        void* scratch) {
    return esper::run<float>(program, first, count, base, hosts, spaces, lanes, stride, scratch);
}

int64_t esper_run_double(const esper::Instruction* program, const int64_t* first, const int64_t* count,
                         const int64_t* base, int64_t hosts, int64_t spaces, int64_t lanes, int64_t stride,
                         void* scratch) {
    return esper::run<double>(program, first, count, base, hosts, spaces, lanes, stride, scratch);
}

#define X(name) #name " "
const char* esper_operations() { return ESPER_OPERATIONS(X); }
#undef X

int64_t esper_instruction_bytes() { return sizeof(esper::Instruction); }
}
