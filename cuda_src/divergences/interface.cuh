// What a divergence must offer in its own header; a kernel includes exactly one.
//
//   struct RowState            partial sums of one row over some of its keys, associative:
//     start()                  no key seen yet
//     absorb(rows, t, s)       static: adds keys to several rows, t[r] and s[r] as tile/logits.cuh has them: logits
//                              t[r][i] in base 2 for i < kCount, or t[r].less(i, reference), and what t[r].weights has
//                              of 2^ that. A pair at kMasked counts for nothing.
//     absorb_once(rows, t, s)  static: the same of scores that weigh; false: nothing was added, the lane has to ask
//                              again with logits
//     merge(other)             joins two states over disjoint keys
//     shuffle(mask)            the state of the lane `mask` away
//     store(to, stride), load(from, stride)  the state, or of a later pass its sums, as floats in memory (their number
//                              stands in the registry)
//     finish(value, lse_t, lse_s) value of the row and the two natural log-sum-exps; a row without keys gives
//                              0, -inf, -inf
//     kMoments                 how many numbers it leaves besides, for gradients and for a later pass
//     moments(to, lse_t)       these, beside the log-sum-exp that came of the row
//     entropy(lse_t)           where kEntropy, the teacher's, nats, beside the log-sum-exp that came of the row
//
// A divergence that needs log-sum-exps first has several passes, and a RowState of each (SKL_PASS counts them):
//     kResumes                 whether it is of a later one. Such a state has no log-sum-exps of its own:
//     resume(moments)          after start(), from what the pass before left of the row
//     finish(value, moments)   the value, and what the moments are at last; NaN makes what else there is of the row NaN
//                              too
//
//   struct LogitGradient<side> derivative of a row's value by one logit, up to a constant:
//     kFactor                  that constant
//     kNeedsValue              whether the row's value is read
//     kOfWeights               whether it is the side's own weight less the other one: then there is `weigh(p, q)` too
//     evaluate(x, y, value)    from x = log2 P, y = log2 Q of the key and the row's value in base 2
//     prepare(row, moments)    where there are moments: makes of the row's statistics those that are read as lse_t,
//                              lse_s, weight and value of the row, in nats (kernels/saved_rows.cu)
//     bound(value)             an upper bound of |evaluate| over the keys of the row, for element types of narrow
//                              exponent
#pragma once
#include "common/math.cuh"

#ifndef SKL_ENTROPY  // of the forward and what joins its splits; other kernels have no row results
#define SKL_ENTROPY 0
#endif
enum : bool { kEntropy = SKL_ENTROPY };  // whether the teacher's entropy is a result of the row

#ifndef SKL_SOME_KEYS
#define SKL_SOME_KEYS 0
#endif
// Whether rows see keys besides those of the call: the moments of a row are its state then, for others to merge, and
// its logit gradients do not add up to 0 over these keys.
enum : bool { kSomeKeys = SKL_SOME_KEYS };

enum Side { kTeacher = 0, kStudent = 1 };

#ifndef SKL_PASS
#define SKL_PASS 0
#endif

constexpr float kUnseen = -1e30f;  // a reference before any key: far below logits, far above kMasked
constexpr float kMasked = -2e30f;  // a logit that must not count; finite, so that differences of two stay numbers
