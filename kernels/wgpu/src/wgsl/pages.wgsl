// Keys and values in pages: [pages, KV_HEADS, PAGE, DIM], each pairs of f16; or with INT8 four signed bytes to a word, of
// which the bytes of a head at a position share a scale.

#if INT8
alias KeyWords = vec2<u32>;
const VALUE_WORDS = DIM / 4u;
#else
alias KeyWords = vec4<u32>;
const VALUE_WORDS = DIM / 2u;
#end

struct Eight {
    low: vec4<f32>,
    high: vec4<f32>,
}

// Eight values of a key, without its scale.
fn eight(words: KeyWords) -> Eight {
#if INT8
    return Eight(vec4<f32>(unpack4xI8(words.x)), vec4<f32>(unpack4xI8(words.y)));
#else
    return Eight(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)),
                 vec4<f32>(unpack2x16float(words.z), unpack2x16float(words.w)));
#end
}

// The word that has a pair of a value, and the pair, without its scale.
fn word_of(pair: u32) -> u32 {
#if INT8
    return pair / 2u;
#else
    return pair;
#end
}

fn two(word: u32, pair: u32) -> vec2<f32> {
#if INT8
    let four = vec4<f32>(unpack4xI8(word));
    return select(four.xy, four.zw, pair % 2u == 1u);
#else
    return unpack2x16float(word);
#end
}

#if INT8
// The scale of values of which the greatest is given, and what each is multiplied by: as on a CPU, in f16.
fn scale_for(greatest: f32) -> vec2<f32> {
    let scale = unpack2x16float(pack2x16float(vec2<f32>(greatest / 127.0, 0.0))).x;
    return vec2<f32>(scale, select(0.0, 1.0 / scale, scale > 0.0));
}
#end
