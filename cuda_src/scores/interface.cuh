// What a score must offer in its own header, as a struct whose name stands in its entry: what the dot product of a
// query and a key means. `n` are the numbers that the arguments have of a side: n.scale, and whatever else the entry
// names.
//
//   kLinear                   adding one vector to all keys adds the same to all logits of a row
//   factor(scale)             what the derivatives of all logits by their dot products share; `scale` is the plain one
//
// One that is linear:
//   logit(dot, n)             the logit in base 2
//   logit(dot, n, reference)  the same less a reference, rounded once
//
// Any other says it in steps. Those of the function, which tile/turn.cuh takes for several dots at a time, in place:
//   prepare(dot, n)           the argument
//   kKnowsAll                 whether `finish` is for any argument; else the following two are there:
//   oddness(x), most(n)       `finish` knows it where the oddness is at most that, and NaN
//   finish_odd(x, n)          the function of any, which takes longer; NaN for NaN, and for what no input has
//   finish(x, n)              the function of it
// and of what it gives, y:
//   kWeighs                   whether 2^logit is had without the logit: `weight(y, factor)` is 2^logit(y, n,
//                             reference), where the factor is `factor_of(n, reference)`; `by_dot(y, factor, other)` is
//                             that weight less another one, times the slope
//   logit(y, n)               the logit in base 2
//   logit(y, n, reference)    the same less a reference
//   slope(y, n)               the logit's derivative by the dot product but for the factor; at most 1 for element types
//                             of narrow exponent
#pragma once
#include "common/types.cuh"
