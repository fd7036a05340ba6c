// The network of a host as a list of instructions, and the loop that carries them out for many hosts.
//
// Who reads them is here; who writes them is assembler.py, which knows the same names in the same order. An operand is
// a place in one of the spaces of a host (its weights, their gradients, a batch, working memory), so that hosts of
// equal structure share one list. Nothing is allocated, and a host reads and writes its own spaces alone: what it gets
// depends on no other host, and hosts may be run by several threads, each with working memory of its own.

#include "convolution.h"
#include "layers.h"
#include "optimizers.h"

// X(name, operands): what lies behind each operand, as a letter of `bytes_of`.
#define ESPER_OPERATIONS(X)                                                                                         \
    X(TRANSPOSE, "mr") X(CONVOLVE, "iwo") X(CONVOLVE_INPUT_GRAD, "owi") X(CONVOLVE_WEIGHT_GRAD, "iow") X(DEPTHWISE, "idi")                \
    X(DEPTHWISE_INPUT_GRAD, "idi") X(DEPTHWISE_WEIGHT_GRAD, "iid") X(BATCH_NORM, "fccccccf") X(BATCH_NORM_BACKWARD, "fccccccff")     \
    X(BATCH_NORM_FIXED, "fccccf") X(GROUP_NORM, "fcccggf") X(GROUP_NORM_BACKWARD, "fcccggfccc") X(MAX_POOL, "pq")        \
    X(MAX_POOL_BACKWARD, "pqp") X(MEAN, "fr") X(MEAN_BACKWARD, "rf") X(ADD_BIAS, "cf") X(ADD_BIAS_BACKWARD, "fc")                \
    X(SCALE, "cff") X(SCALE_BACKWARD, "cffc") X(MODULATE, "frf") X(MODULATE_BACKWARD, "ffr") X(SHIFT, "1rrr")                \
    X(SHIFT_BACKWARD, "1rrr1") X(ACTIVATE, "rr") X(ACTIVATE_BACKWARD, "rrr") X(BLEND, "rrb1r") X(BLEND_BACKWARD, "rrb1rrb")        \
    X(CROSS_ENTROPY, "rltr") X(SQUARE_NORM, "c1") X(CLIP, "1") X(SGD, "1cccc") X(ADAMW, "1cccccs")

namespace esper {

#define X(name, operands) name,
enum Operation : int32_t { ESPER_OPERATIONS(X) };
#undef X

#define X(name, operands) operands,
constexpr const char* OPERANDS_OF[] = {ESPER_OPERATIONS(X)};
#undef X

constexpr int SIZES = 6, NUMBERS_GIVEN = 5, OPERANDS = 10;

enum Space : int32_t { NOTHING = -1, ROWS = 0, NUMBERS = 1 };  // working memory: rows of lanes, and single numbers

struct Instruction {
    int32_t operation;
    int32_t flag;          // ReLU afterwards, the kind of activation, whether a seed is active
    int32_t size[SIZES];
    double number[NUMBERS_GIVEN];  // epsilon, momentum; rates of an optimizer
    int32_t space[OPERANDS];
    int64_t offset[OPERANDS];  // rows in ROWS, elements elsewhere
};

template <class T> struct Host {
    const int64_t *base, *size;  // addresses of the spaces, and their bytes
    int64_t spaces;
    int lanes, stride;
    T* scratch;  // weights in another order, or a few rows
    int64_t scratch_size;

    template <class U = T> U* at(const Instruction& i, int k) const {
        if (i.space[k] == NOTHING) return nullptr;
        const int64_t step = i.space[k] == ROWS ? stride : 1;
        return reinterpret_cast<U*>(base[i.space[k]]) + i.offset[k] * step;
    }

    // Bytes of an operand of this letter, and of the unit that offsets are counted in.
    int64_t bytes_of(const Instruction& i, char letter, int64_t& unit) const {
        const int64_t n0 = i.size[0], n1 = i.size[1], n2 = i.size[2], n3 = i.size[3], taps = int64_t(i.size[4]) * i.size[4];
        const int64_t number = sizeof(T), row = number * stride;
        unit = number;
        switch (letter) {
            case '1': return number;                            // one number
            case 'c': return n0 * number;                       // one for each channel or weight
            case 'w': return n0 * n1 * taps * number;           // weights of a convolution
            case 'd': return n0 * taps * number;                // of a depthwise one
            case 'm': return n0 * lanes * number;               // images
            case 'b': return row;                               // a row of lanes
            case 'r': return n0 * row;                          // rows
            case 'g': return n2 * row;                          // a row for each group
            case 'f': return n0 * n1 * row;                     // channels of positions
            case 'i': return n0 * n2 * n3 * row;                // inputs of a convolution
            case 'o': return n1 * n2 * n3 * row;                // its outputs
            case 'p': return n0 * n1 * n2 * row;                // what is pooled
            case 'q': return n0 * (n1 / 2) * (n2 / 2) * row;    // and to what
        }
        unit = 8;
        return letter == 'l' ? int64_t(lanes) * 8 : letter == 't' ? 16 : 8;  // labels, sum and count, steps
    }

    int64_t scratch_bytes(const Instruction& i) const {
        if (i.operation == CROSS_ENTROPY) return int64_t(3) * stride * sizeof(T);
        if (i.operation != CONVOLVE && i.operation != CONVOLVE_INPUT_GRAD) return 0;
        const Shape shape{i.size[0], i.size[1], i.size[2], i.size[3], i.size[4]};
        const Shape turned{shape.outputs, shape.inputs, shape.height, shape.width, shape.kernel};
        return packed_size(i.operation == CONVOLVE ? shape : turned) * sizeof(T);
    }

    // Whether the instruction exists and stays within the memory that it was given.
    bool fits(const Instruction& i) const {
        if (i.operation < 0 || i.operation > ADAMW || scratch_bytes(i) > scratch_size) return false;
        const char* letters = OPERANDS_OF[i.operation];
        for (int k = 0; letters[k]; ++k) {
            if (i.space[k] == NOTHING) continue;
            if (i.space[k] < 0 || i.space[k] >= spaces || i.offset[k] < 0) return false;
            int64_t unit;
            const int64_t bytes = bytes_of(i, letters[k], unit);
            if (i.offset[k] * unit * (i.space[k] == ROWS ? stride : 1) + bytes > size[i.space[k]]) return false;
        }
        if (i.operation == CROSS_ENTROPY)
            for (int lane = 0; lane < lanes; ++lane)
                if (at<int64_t>(i, 1)[lane] >= i.size[0]) return false;
        return true;
    }

    Affine<T> affine(const Instruction& i, int k) const { return {at(i, k), at(i, k + 1)}; }

    Rates<T> rates(const Instruction& i) const {
        return {T(i.number[0]), T(i.number[1]), T(i.number[2]), T(i.number[3]), T(i.number[4])};
    }

    void run(const Instruction& i) const {
        const int32_t* n = i.size;
        switch (i.operation) {
            case TRANSPOSE: transpose<T>(n[0], at(i, 0), at(i, 1), lanes, stride); return;
            case CONVOLVE:
                convolve<T>({n[0], n[1], n[2], n[3], n[4]}, at(i, 0), at(i, 1), false, at(i, 2), lanes, stride, scratch);
                return;
            case CONVOLVE_INPUT_GRAD:  // sizes as of the way forward
                convolve<T>({n[1], n[0], n[2], n[3], n[4]}, at(i, 0), at(i, 1), true, at(i, 2), lanes, stride, scratch);
                return;
            case CONVOLVE_WEIGHT_GRAD: convolve_weight_grad<T>({n[0], n[1], n[2], n[3], n[4]}, at(i, 0), at(i, 1), at(i, 2), stride); return;
            case DEPTHWISE:
                depthwise<T>({n[0], n[0], n[2], n[3], n[4]}, at(i, 0), at(i, 1), false, at(i, 2), lanes, stride);
                return;
            case DEPTHWISE_INPUT_GRAD:
                depthwise<T>({n[0], n[0], n[2], n[3], n[4]}, at(i, 0), at(i, 1), true, at(i, 2), lanes, stride);
                return;
            case DEPTHWISE_WEIGHT_GRAD:
                depthwise_weight_grad<T>({n[0], n[0], n[2], n[3], n[4]}, at(i, 0), at(i, 1), at(i, 2), stride);
                return;
            case BATCH_NORM:
                batch_norm<T>(n[0], n[1], i.flag, T(i.number[0]), T(i.number[1]), at(i, 0), affine(i, 1), at(i, 3),
                              at(i, 4), at(i, 5), at(i, 6), at(i, 7), lanes, stride);
                return;
            case BATCH_NORM_BACKWARD:
                batch_norm_backward<T>(n[0], n[1], i.flag, at(i, 0), at(i, 7), affine(i, 1), at(i, 3), at(i, 4), at(i, 8),
                                   at(i, 5), at(i, 6), lanes, stride);
                return;
            case BATCH_NORM_FIXED:
                batch_norm_fixed<T>(n[0], n[1], i.flag, T(i.number[0]), at(i, 0), affine(i, 1), at(i, 3), at(i, 4),
                                    at(i, 5), lanes, stride);
                return;
            case GROUP_NORM:
                group_norm<T>(n[0], n[1], n[2], i.flag, T(i.number[0]), at(i, 0), affine(i, 1), at(i, 3), at(i, 4),
                              at(i, 5), at(i, 6), lanes, stride);
                return;
            case GROUP_NORM_BACKWARD:
                group_norm_backward<T>(n[0], n[1], n[2], i.flag, at(i, 0), affine(i, 1), at(i, 3), at(i, 4), at(i, 5),
                                   at(i, 6), at(i, 7), at(i, 8), at(i, 9), lanes, stride);
                return;
            case MAX_POOL: max_pool<T>(n[0], n[1], n[2], at(i, 0), at(i, 1), lanes, stride); return;
            case MAX_POOL_BACKWARD:
                max_pool_backward<T>(n[0], n[1], n[2], at(i, 0), at(i, 1), at(i, 2), lanes, stride);
                return;
            case MEAN: mean_space<T>(n[0], n[1], at(i, 0), at(i, 1), stride); return;
            case MEAN_BACKWARD: mean_space_backward<T>(n[0], n[1], at(i, 0), at(i, 1), lanes, stride); return;
            case ADD_BIAS: add_bias<T>(n[0], n[1], at(i, 0), at(i, 1), lanes, stride); return;
            case ADD_BIAS_BACKWARD: add_bias_backward<T>(n[0], n[1], at(i, 0), at(i, 1), lanes, stride); return;
            case SCALE: scale<T>(n[0], n[1], at(i, 0), at(i, 1), at(i, 2), lanes, stride); return;
            case SCALE_BACKWARD:
                scale_backward<T>(n[0], n[1], at(i, 0), at(i, 1), at(i, 2), at(i, 3), lanes, stride);
                return;
            case MODULATE: modulate<T>(n[0], n[1], at(i, 0), at(i, 1), at(i, 2), lanes, stride); return;
            case MODULATE_BACKWARD: modulate_backward<T>(n[0], n[1], at(i, 0), at(i, 1), at(i, 2), stride); return;
            case SHIFT: shift<T>(n[0], at(i, 0), at(i, 1), at(i, 2), at(i, 3), lanes, stride); return;
            case SHIFT_BACKWARD:
                shift_backward<T>(n[0], at(i, 0), at(i, 1), at(i, 2), at(i, 3), at(i, 4), lanes, stride);
                return;
            case ACTIVATE: activate<T>(n[0], i.flag, at(i, 0), at(i, 1), lanes, stride); return;
            case ACTIVATE_BACKWARD: activate_backward<T>(n[0], i.flag, at(i, 0), at(i, 1), at(i, 2), lanes, stride); return;
            case BLEND:
                blend<T>(n[0], n[1], at(i, 0), at(i, 1), at(i, 2), *at(i, 3), at(i, 4), lanes, stride);
                return;
            case BLEND_BACKWARD:
                blend_backward<T>(n[0], n[1], i.flag, at(i, 0), at(i, 1), at(i, 2), *at(i, 3), at(i, 4), at(i, 5), at(i, 6),
                             lanes, stride);
                return;
            case CROSS_ENTROPY:
                cross_entropy<T>(n[0], at(i, 0), at<int64_t>(i, 1), at<double>(i, 2), at(i, 3), scratch, lanes, stride);
                return;
            case SQUARE_NORM: square_norm<T>(n[0], at(i, 0), i.flag, at(i, 1)); return;
            case CLIP: *at(i, 0) = clip_factor<T>(*at(i, 0), T(i.number[0])); return;
            case SGD:
                sgd<T>(n[0], rates(i), *at(i, 0), at(i, 1), at(i, 2), at(i, 3), at(i, 4));
                return;
            case ADAMW:
                adamw<T>(n[0], rates(i), *at(i, 0), at(i, 1), at(i, 2), at(i, 3), at(i, 4), at(i, 5), at<int64_t>(i, 6));
                return;
        }
    }
};

// Runs instructions first[h] to first[h] + count[h] for each host; base[h] are the addresses of its spaces and size[h]
// their bytes. Returns the number of the first instruction that does not fit, or -1.
template <class T>
int64_t run(const Instruction* program, const int64_t* first, const int64_t* count, const int64_t* base,
            const int64_t* size, int64_t hosts, int64_t spaces, int64_t lanes, int64_t stride, void* scratch,
            int64_t scratch_size) {
    for (int64_t h = 0; h < hosts; ++h) {
        const Host<T> host{base + h * spaces,        size + h * spaces,        spaces,      static_cast<int>(lanes),
                           static_cast<int>(stride), static_cast<T*>(scratch), scratch_size};
        for (int64_t i = first[h]; i < first[h] + count[h]; ++i) {
            if (!host.fits(program[i])) return i;
            host.run(program[i]);
        }
    }
    return -1;
}

}  // namespace esper

#define ESPER_RUN(name, T)                                                                                          \
    int64_t name(const esper::Instruction* program, const int64_t* first, const int64_t* count, const int64_t* base, \
                 const int64_t* size, int64_t hosts, int64_t spaces, int64_t lanes, int64_t stride, void* scratch,   \
                 int64_t scratch_size) {                                                                            \
        return esper::run<T>(program, first, count, base, size, hosts, spaces, lanes, stride, scratch, scratch_size); \
    }

extern "C" {

ESPER_RUN(esper_run_float, float)
ESPER_RUN(esper_run_double, double)

#define X(name, operands) #name " "
const char* esper_operations() { return ESPER_OPERATIONS(X); }
#undef X

int64_t esper_instruction_bytes() { return sizeof(esper::Instruction); }
}
