// Of a row the ROUTES experts with the greatest scores, of equal ones those with lower numbers, and their weights: the
// softmax over all, divided by the sum of the chosen ones if NORMALIZED. A workgroup of THREADS has a row.

var<workgroup> of_row: array<f32, COUNT>;
var<workgroup> chosen: array<u32, ROUTES>;
var<workgroup> score_sums: array<f32, 64>;

// Leaves the experts in `chosen`, and returns the weight of number `index` of them.
fn choose(row: u32, index: u32) -> f32 {
    for (var i = index; i < COUNT; i += THREADS) {
        of_row[i] = scores[row * COUNT + i];
    }
    if (index < ROUTES) {
        // Scores that are no numbers may leave a place empty; their weights are no numbers either.
        chosen[index] = index;
    }
    workgroupBarrier();
    for (var i = index; i < COUNT; i += THREADS) {
        var before = 0u;
        for (var j = 0u; j < COUNT; j++) {
            let ahead = of_row[j] > of_row[i] || (of_row[j] == of_row[i] && j < i);
            before += select(0u, 1u, ahead);
        }
        if (before < ROUTES) {
            chosen[before] = i;
        }
    }
    workgroupBarrier();
    let most = of_row[chosen[0]];
    if (index < 64u) {
        var sum = 0.0;
        for (var i = index; i < COUNT; i += 64u) {
#if NORMALIZED
            sum += of_row[i] - of_row[i];
#else
            sum += exp(of_row[i] - most);
#end
        }
        score_sums[index] = sum;
    }
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < 64u; i++) {
        sum += score_sums[i];
    }
#if NORMALIZED
    for (var i = 0u; i < ROUTES; i++) {
        sum += exp(of_row[chosen[i]] - most);
    }
#end
    return exp(of_row[chosen[min(index, ROUTES - 1u)]] - most) / sum;
}
