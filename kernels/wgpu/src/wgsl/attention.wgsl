// Attention of up to QUERIES heads of queries that share one of keys and values: those of a row, or of the rows of a
// tile, which are consecutive ones of a sequence. A workgroup reads the pages of one part, 64 keys at a time with an
// online softmax (arXiv 2205.14135), the next ones always on their way. If there are several parts, it leaves sums and
// softmax to combine.wgsl. With ALONE, a tile is the last row of its sequence; every workgroup prepares its heads for
// itself (heads.wgsl), and the one whose part holds the row's position keeps the key and the value there.

@group(0) @binding(7) var<storage, read_write> attended: array<f32>; // [rows, HEADS, DIM]
@group(0) @binding(8) var<storage, read_write> parts: array<f32>;    // [rows, HEADS, splits, DIM + 2]: sums, greatest score, sum of weights

var<workgroup> queries: array<vec4<f32>, QUERIES * DIM / 4>;
// Sums of scores, by the four invocations that share a key.
var<workgroup> partial: array<f32, QUERIES * 256>;
var<workgroup> scores: array<f32, QUERIES * 64>;
// The greatest score of each share of the keys, and the sum of weights.
var<workgroup> maxima: array<vec2<f32>, VALUE_SHARES>;

// Where the keys from `base` on are; past the end of a part, where its first ones are.
fn place_of(table: u32, kv_head: u32, begin: u32, base: u32, end: u32) -> u32 {
    let first = select(begin, base, base < end);
    // A part behind the tile reads its first page, and uses nothing of it.
    let page = select(0u, first / PAGE, first < end);
    return (batch[table + page] * KV_HEADS + kv_head) * PAGE + first % PAGE;
}

#if INT8
// The scale of the key, or of the value, at a position; the row's own may not be in its page yet.
fn scale_at(table: u32, kv_head: u32, at: u32, position: u32, which: u32) -> f32 {
#if ALONE
    if (at == position) {
        return new_scales[which];
    }
#end
    return scales[2u * ((batch[table + at / PAGE] * KV_HEADS + kv_head) * PAGE + at % PAGE) + which];
}
#end

// The number of the last key of those from `base` on.
fn last_of(base: u32, end: u32) -> u32 {
    return select(0u, min(63u, end - base - 1u), base < end);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let split = group.x;
    let kv_head = group.y / SHARES;
    let first_query = group.y % SHARES * QUERIES;
#if ALONE
    // A row is not looked up, so that its heads are on their way at once.
    let first_row = group.z;
    let rows = 1u;
    let position = batch[4u * first_row];
    let table = step.tables_at + batch[4u * first_row + 1u];
#else
    let tile = step.tiles_at + 4u * group.z;
    let first_row = batch[tile];
    let rows = batch[tile + 1u];
    let position = batch[tile + 2u];
    let table = step.tables_at + batch[tile + 3u];
#end
#if ALONE
    let loaded = load_heads(first_row, kv_head, first_query, index);
#end
    let begin = split * step.split_pages * PAGE;
    let end = min(position + rows, begin + step.split_pages * PAGE);
    // Four neighbours share a key, and invocations that share values have some keys each.
    let key = index / 4u;
    let quarter = index % 4u;
    let pair = index % PAIRS;
    let share = index / PAIRS;
#for n in PER_QUARTER
    let vector$n = min(4u * $nu + quarter, DIM / 8u - 1u);
#end
    // Keys past the end are read as the last one, and do not count.
    var place = place_of(table, kv_head, begin, begin, end);
    var last = last_of(begin, end);
#for n in PER_QUARTER
    var key_words$n = keys[(place + min(key, last)) * (DIM / 8u) + vector$n];
#end
#for k in PER_SHARE
    var value_words$k = values[(place + min(share * PER_SHARE + $ku, last)) * VALUE_WORDS + word_of(pair)];
#end

    // Queries past the end are computed as the last one, and not written.
#if ALONE
    prepare_heads(first_row, kv_head, first_query, index, loaded);
    if (end == position + 1u && begin <= position) {
        keep_heads(table, kv_head, position, index);
    }
#else
    for (var i = index; i < QUERIES * DIM; i += 256u) {
        let query = min(first_query + i / DIM, rows * GROUP - 1u);
        let row = first_row + query / GROUP;
        heads[i] = qkv[row * STRIDE + (kv_head * GROUP + query % GROUP) * QUERY_STEP + i % DIM];
    }
    workgroupBarrier();
#end
    for (var i = index; i < QUERIES * DIM / 4u; i += 256u) {
        queries[i] = vec4<f32>(heads[4u * i], heads[4u * i + 1u], heads[4u * i + 2u], heads[4u * i + 3u]) * SCALE;
    }
    workgroupBarrier();

#for q in QUERIES
    var sum$q = vec2<f32>();
    var most$q = NOTHING;
    var total$q = 0.0;
#end
    for (var base = begin; base < end; base += 64u) {
        let count = min(64u, end - base);
#for n in PER_QUARTER
        var now_key$n = key_words$n;
#end
#for k in PER_SHARE
        var now_value$k = value_words$k;
#end
        place = place_of(table, kv_head, begin, base + 64u, end);
        last = last_of(base + 64u, end);
#for n in PER_QUARTER
        key_words$n = keys[(place + min(key, last)) * (DIM / 8u) + vector$n];
#end
#for k in PER_SHARE
        value_words$k = values[(place + min(share * PER_SHARE + $ku, last)) * VALUE_WORDS + word_of(pair)];
#end
#if ALONE
        // The row's own were read before they were written; what stands in for those behind must be finite, too.
        if (base + key >= position) {
#for n in PER_QUARTER
            now_key$n = new_key(vector$n);
#end
        }
#for k in PER_SHARE
        if (base + share * PER_SHARE + $ku >= position) {
            now_value$k = new_value(word_of(pair));
        }
#end
#end
#for q in QUERIES
        var score$q = 0.0;
#end
#for n in PER_QUARTER
        if (4u * $nu + quarter < DIM / 8u) {
            let at = 2u * (4u * $nu + quarter);
            let k = eight(now_key$n);
#for q in QUERIES
            score$q += dot(queries[$qu * (DIM / 4u) + at], k.low) + dot(queries[$qu * (DIM / 4u) + at + 1u], k.high);
#end
        }
#end
#for q in QUERIES
        partial[256u * $qu + index] = score$q;
#end
        workgroupBarrier();
        for (var i = index; i < QUERIES * 64u; i += 256u) {
            var score = partial[4u * i] + partial[4u * i + 1u] + partial[4u * i + 2u] + partial[4u * i + 3u];
#if INT8
            score *= scale_at(table, kv_head, base + min(i % 64u, count - 1u), position, 0u);
#end
            // A row sees the keys up to its own.
            let seen = position + (first_query + i / 64u) / GROUP + 1u;
            scores[i] = select(NOTHING, score, i % 64u < min(count, seen - min(base, seen)));
        }
        workgroupBarrier();
#for k in PER_SHARE
        var value$k = two(now_value$k, pair);
#if INT8
        value$k *= scale_at(table, kv_head, base + min(share * PER_SHARE + $ku, count - 1u), position, 1u);
#end
#end
        // Invocations of a share have a softmax of its keys for themselves: they wait for no other share, and shares are
        // joined behind the loop.
#for q in QUERIES
        {
            var most = most$q;
#for k in PER_SHARE
            let score$k = scores[$qu * 64u + min(share * PER_SHARE + $ku, 63u)];
            most = max(most, score$k);
#end
            let shrinks = exp(most$q - most);
            most$q = most;
            total$q *= shrinks;
            sum$q *= shrinks;
#for k in PER_SHARE
            if (share * PER_SHARE + $ku < 64u) {
                // Before the first key that a query sees, nothing counts.
                let weight = select(exp(score$k - most), 0.0, score$k == NOTHING);
                total$q += weight;
                sum$q += value$k * weight;
            }
#end
        }
#end
    }
#for q in QUERIES
    sums[index] = sum$q;
    if (index % PAIRS == 0u && share < VALUE_SHARES) {
        maxima[share] = vec2<f32>(most$q, total$q);
    }
    workgroupBarrier();
    if (index < PAIRS && first_query + $qu < rows * GROUP) {
        var greatest = NOTHING;
        for (var s = 0u; s < VALUE_SHARES; s++) {
            greatest = max(greatest, maxima[s].x);
        }
        var both = vec2<f32>();
        var total = 0.0;
        for (var s = 0u; s < VALUE_SHARES; s++) {
            let shrinks = exp(maxima[s].x - greatest);
            both += sums[s * PAIRS + index] * shrinks;
            total += maxima[s].y * shrinks;
        }
        let row = first_row + (first_query + $qu) / GROUP;
        let head = kv_head * GROUP + (first_query + $qu) % GROUP;
        let at = row * HEADS + head;
        if (step.splits == 1u) {
            both /= total;
#if GATED
            let gate = row * STRIDE + head * QUERY_STEP + DIM + 2u * index;
            both /= 1.0 + exp(-vec2<f32>(qkv[gate], qkv[gate + 1u]));
#end
            attended[at * DIM + 2u * index] = both.x;
            attended[at * DIM + 2u * index + 1u] = both.y;
        } else {
            let to = (at * step.splits + split) * (DIM + 2u);
            parts[to + 2u * index] = both.x;
            parts[to + 2u * index + 1u] = both.y;
            if (index == 0u) {
                parts[to + DIM] = greatest;
                parts[to + DIM + 1u] = total;
            }
        }
    }
    workgroupBarrier();
#end
}
