//! Prefill and decode of the demo model, from tokens to logits: unquantized, and quantized by
//! rounding, with every activation type that is some scheme's best.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use nq_formats::{Bits, Checkpoint};
use nq_load::load;
use nq_quantize::{Schemes, quantize_at_load};
use nq_runtime::generate::rewind;
use nq_runtime::{ActivationChoice, Chunk, DeviceChoice, LoadOptions, LogitsWanted, SessionSpec};
use std::hint::black_box;

const PROMPT: usize = 512;

fn end_to_end(c: &mut Criterion) {
    let folder = nq_testkit::demo();
    let int8 = ActivationChoice::Int8 { group: 32 };
    let int16 = ActivationChoice::Int16 { group: 128 };
    for (bits, activations) in [
        (None, ActivationChoice::F32),
        (None, ActivationChoice::Bf16),
        (Some(Bits::B4), ActivationChoice::F32),
        (Some(Bits::B4), int8),
        (Some(Bits::B4), ActivationChoice::Auto),
        (Some(Bits::B8), ActivationChoice::F32),
        (Some(Bits::B8), int8),
        (Some(Bits::B8), int16),
    ] {
        let checkpoint = Checkpoint::open(&folder).expect("the demo model");
        let checkpoint = match bits {
            None => checkpoint,
            Some(bits) => quantize_at_load(checkpoint, Schemes::defaults(bits))
                .expect("schemes for any model"),
        };
        let options = LoadOptions {
            device: DeviceChoice::Cpu,
            activations,
            ..LoadOptions::default()
        };
        let engine = load(checkpoint.config(), checkpoint.store(), &options, &())
            .expect("the demo model runs");
        let spec = SessionSpec {
            slots: 1,
            ctx: PROMPT + 1,
            max_rows: PROMPT,
            ..SessionSpec::default()
        };
        let mut session = engine.session(spec).expect("a small session");
        let vocab = engine.config().vocab_size as u32;
        let tokens: Vec<u32> = (0..PROMPT as u32)
            .map(|i| i.wrapping_mul(2_654_435_761) % vocab)
            .collect();
        let found = engine.description();
        let name = format!(
            "demo, {} bits, activations {}",
            found.bits, found.activations
        );

        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Elements(PROMPT as u64));
        let mut forward = |keep: usize, fed: &[u32]| {
            rewind(&mut *session, 0, &tokens[..keep]).expect("it fits");
            let chunk = Chunk {
                slot: 0,
                tokens: fed,
                logits: LogitsWanted::Last,
            };
            let logits = session.forward(&[chunk], None).expect("it fits");
            black_box(logits.data[0]);
        };
        group.bench_function("prefill 512", |b| b.iter(|| forward(0, &tokens)));
        group.throughput(Throughput::Elements(1));
        group.bench_function("decode at 512", |b| {
            b.iter(|| forward(PROMPT, &tokens[..1]))
        });
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = end_to_end
}
criterion_main!(benches);
