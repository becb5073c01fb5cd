//! docs/cards.csv, from which the tables of docs/cards.md are made: the GPU memory of published models by kind of
//! file and length of the context, as the plan of loading counts it. Needs no GPU.

use nq_formats::trellis::Code;
use nq_formats::{Bits, TrellisScheme};
use nq_load::gpu;
use nq_model::names::EMBEDDING;
use nq_model::{DType, Dims, ModelConfig, Preset};
use nq_quantize::{Recipe, Schemes};
use nq_runtime::{KvType, SessionSpec};
use nq_testkit::sessions::session_spec;
use std::fmt::Write;
use std::path::Path;

const MODELS: [&str; 16] = [
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3.5-4b",
    "qwen3.5-9b",
    "qwen3.8-27b",
    "qwen3.6-35b-a3b",
    "qwen3-coder-next",
    "qwen2.5-7b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "llama-3.3-70b",
];

/// Flags of `nq quantize`, and the schemes that they choose.
fn files(c: &ModelConfig) -> [(&'static str, Schemes); 4] {
    let usual = |recipe: Recipe| recipe.schemes(c).unwrap().0;
    let trellis = |bits| usual(TrellisScheme::of_bits(Code::Octagon, bits).unwrap().into());
    [
        ("--trellis --bits 3", trellis(3.0)),
        ("--trellis", trellis(4.0)),
        ("--bits 4", usual(Bits::B4.into())),
        ("--bits 8", usual(Bits::B8.into())),
    ]
}

#[test]
fn the_table_of_cards_is_what_plans_say() {
    let sizes = gpu::sizes().unwrap();
    let mut table = "model,file,kv,context,weights,keys_and_values,buffers,embedding\n".to_owned();
    for name in MODELS {
        let c = Preset::find(name).expect("a published shape").config();
        for (file, schemes) in files(&c) {
            let kinds = |name: &str| schemes.kind(name, DType::BF16);
            let embedding = kinds(EMBEDDING).bytes(Dims::new(c.vocab_size, c.hidden_size));
            for kv in [KvType::F16, KvType::Int8] {
                for thousands in [4, 8, 16, 32, 64, 128, 256] {
                    let ctx = 1024 * thousands;
                    if ctx > c.max_position_embeddings {
                        continue;
                    }
                    let spec = session_spec(1, ctx, kv, SessionSpec::prompt_rows(false));
                    let plan = (sizes.engine)(&c, &kinds, &spec).unwrap();
                    let (weights, kept, buffers) = (plan.weights, plan.kv, plan.scratch);
                    writeln!(
                        table,
                        "{name},{file},{kv},{ctx},{weights},{kept},{buffers},{embedding}"
                    )
                    .unwrap();
                }
            }
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cards.csv");
    if std::env::var_os("NQ_WRITE_CARDS").is_some() {
        std::fs::write(&path, &table).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = written.lines().zip(table.lines()).find(|(a, b)| a != b);
    assert!(
        written == table,
        "docs/cards.csv: {differs:?}: run this test with NQ_WRITE_CARDS=1, then docs/figures.py --write"
    );
}
