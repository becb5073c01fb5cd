// A unit: 32 consecutive inputs of a row of a weight. Codes of 4 to 6 bits have their low 4 bits in `codes`: in word i
// of 4, the low half of byte b is input 8i + b and the high half input 8i + 4 + b. Higher bits are in `high`: bits
// HIGH_BITS j of byte b belong to input 4j + b. Codes of 8 bits, and floats, are in the order of inputs.
// `affine` holds for each row and group the f16 scale, and above it the f16 zero-point, or the offset itself.

struct Slice {
    rows: u32,    // rows of the weight in these buffers
    units: u32,   // units in a row
    row0: u32,    // number of the first row among all of the product
    stride: u32,  // outputs in a row of y
    groups: u32,  // groups in a row
    shift: u32,   // the logarithm of a group's inputs
    expert0: u32, // of a stack of experts: the first in these buffers, and the rows of each
    expert_rows: u32,
}

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> high: array<u32>;
@group(0) @binding(2) var<storage, read> affine: array<u32>;
@group(0) @binding(3) var<uniform> slice: Slice;

#if FLOATS
// A unit's words.
alias Raw = array<vec4<u32>, WORDS4>;

fn raw_unit(row: u32, unit: u32) -> Raw {
    var raw: Raw;
    let at = (row * slice.units + unit) * WORDS4;
#for j in WORDS4
    raw[$j] = codes[at + $ju];
#end
    return raw;
}

fn quad(raw: Raw, j: u32) -> vec4<f32> {
#if F32
    return bitcast<vec4<f32>>(raw[j]);
#else
    let words = select(raw[j / 2u].xy, raw[j / 2u].zw, j % 2u == 1u);
#if BF16
    return vec4<f32>(bitcast<f32>(words.x << 16u), bitcast<f32>(words.x & 0xffff0000u),
                     bitcast<f32>(words.y << 16u), bitcast<f32>(words.y & 0xffff0000u));
#else
    return vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
#end
#end
}

fn scale_of(row: u32, unit: u32, half: u32) -> vec2<f32> {
    return vec2<f32>(1.0, 0.0);
}

#else
// A unit's words: the low bits of its codes, and behind them higher ones.
alias Words = array<vec4<u32>, WORDS4 + HIGH_WORDS>;

fn unit_words(row: u32, unit: u32) -> Words {
    var words: Words;
    let at = row * slice.units + unit;
#for i in WORDS4
    words[$i] = codes[WORDS4 * at + $iu];
#end
#if BITS5
    words[1].x = high[at];
#end
#if BITS6
    words[1].x = high[2u * at];
    words[1].y = high[2u * at + 1u];
#end
    return words;
}

// A unit's codes, four to a word, in the order of inputs.
alias Raw = array<u32, 8>;

fn unpacked(words: Words) -> Raw {
    var raw: Raw;
#if BITS8
#for i in 2
#for c in 4
    raw[4 * $i + $c] = words[$i][$c];
#end
#end
#else
#for i in 4
    raw[2 * $i] = words[0][$i] & 0x0f0f0f0fu;
    raw[2 * $i + 1] = (words[0][$i] >> 4u) & 0x0f0f0f0fu;
#end
#if BITS5
#for j in 8
    raw[$j] |= ((words[1].x >> $ju) & 0x01010101u) << 4u;
#end
#end
#if BITS6
#for i in 2
#for c in 4
    raw[4 * $i + $c] |= ((words[1][$i] >> (2u * $cu)) & 0x03030303u) << 4u;
#end
#end
#end
#end
    return raw;
}

fn raw_unit(row: u32, unit: u32) -> Raw {
    return unpacked(unit_words(row, unit));
}

fn quad(raw: Raw, j: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(raw[j]));
}

// Scale and offset of half a unit.
fn scale_of(row: u32, unit: u32, half: u32) -> vec2<f32> {
    let group = (unit * 32u + half * 16u) >> slice.shift;
    let both = unpack2x16float(affine[row * slice.groups + group]);
#if OFFSETS
    return both;
#else
    return vec2<f32>(both.x, -both.x * both.y);
#end
}
#end
