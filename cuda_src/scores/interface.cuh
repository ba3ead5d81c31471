// What a score must offer in its own header; a kernel includes exactly one.
//
//   struct Score<side>              what the dot product of a query and a key means:
//     logit(dot, scale)             the logit in base 2; `scale` is the side's, times log2(e)
//     logit(dot, scale, reference)  the same less a reference, rounded once if that can be
//     slope(logit, scale)           the derivative of a logit by its dot product, up to a factor that all pairs share;
//                                   at most 1 for element types of narrow exponent
//     factor(scale)                 that factor; `scale` is the side's plain one
//     kLinear                       adding one vector to all keys adds the same to all logits of a row
#pragma once
#include "common/types.cuh"
