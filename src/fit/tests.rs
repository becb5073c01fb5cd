//! Imagined machines: nothing is measured here.

#![allow(
    clippy::print_stdout,
    reason = "figures beside those that were measured, and skips, are for the reader"
)]

use super::*;
use nq_kernels::Isa;
use nq_model::Preset;
use speed::lines;
use std::path::Path;

fn shape(preset: &str) -> ModelConfig {
    Preset::find(preset).expect("a published shape").config()
}

fn file(c: &ModelConfig, flags: &str) -> FileKind {
    let all = FileKind::all(c).expect("schemes that fit");
    all.into_iter()
        .find(|f| f.flags == flags)
        .expect("a kind of file")
}

/// A computer whose 32 GB are read at so many GB/s by cores of such instructions.
fn host(read_gb_s: f64, threads: usize, isa: Isa) -> Host {
    Host {
        free_bytes: 32_000_000_000,
        memory_known: Known::Given,
        read_gb_s: Some(read_gb_s),
        cores: Cores { threads, isa },
    }
}

fn with(card: &str) -> Machine {
    Machine {
        cards: Some(cards::find(card).expect("a card")),
        host: host(50.0, 16, Isa::Avx512Bf16),
    }
}

const ONE: Use = Use {
    context: 8192,
    clients: 1,
};

fn row(preset: &str, flags: &str, wanted: Use, machine: &Machine) -> FileRow {
    row_beside(preset, flags, wanted, machine, Beside::default())
}

fn row_beside(
    preset: &str,
    flags: &str,
    wanted: Use,
    machine: &Machine,
    beside: Beside,
) -> FileRow {
    let config = &shape(preset);
    let asked = FitQuestion {
        config,
        machine,
        wanted,
        beside,
    };
    asked.row(&file(config, flags), KvType::F16).expect("a row")
}

/// Images, drafts and adapters take what they take, and a file that only just fits no longer does.
#[test]
fn what_is_beside_a_model_takes_memory_too() {
    let mut cores = Machine {
        cards: None,
        host: host(50.0, 2, Isa::Avx512Bf16),
    };
    let beside = Beside {
        images: 300_000_000,
        drafts: 20_000_000,
        adapters: 1_000_000,
        ..Beside::default()
    };
    let said =
        "beside the text model: 300.00 MB for images, 20.00 MB for drafts, 1.00 MB for adapters";
    assert_eq!(beside.line().as_deref(), Some(said));
    assert_eq!(Beside::default().line(), None);
    let alone = row("qwen3-0.6b", "--bits 4", ONE, &cores);
    cores.host.free_bytes = alone.needed_bytes;
    assert!(row("qwen3-0.6b", "--bits 4", ONE, &cores).fits);
    let both = row_beside("qwen3-0.6b", "--bits 4", ONE, &cores, beside);
    assert_eq!(both.needed_bytes, alone.needed_bytes + 321_000_000);
    assert!(!both.fits);
    if gpu::BUILT_IN {
        let adapters = Beside {
            adapters: 1_000_000,
            ..Beside::default()
        };
        let card = with("RTX 4090");
        let alone = row("qwen3-8b", "--bits 4", ONE, &card);
        let both = row_beside("qwen3-8b", "--bits 4", ONE, &card, adapters);
        assert_eq!(both.needed_bytes, alone.needed_bytes + 1_000_000);
    }
}

/// A hybrid on a card whose kernels no record has with hybrids: its speed is an H200's by bandwidth, and says so.
#[test]
fn a_speed_that_rests_on_other_kernels_says_so() {
    if !gpu::BUILT_IN {
        println!("skipped: no CUDA in this build");
        return;
    }
    let on = |preset, card| row(preset, "--bits 4 --simple", ONE, &with(card));
    for (preset, card, other) in [
        ("qwen3.5-9b", "RTX 4090", true),
        ("qwen3.5-9b", "H100 SXM", false),
        ("qwen3-8b", "RTX 4090", false),
    ] {
        let found = on(preset, card);
        assert!(found.tok_s.is_some(), "{preset} {card}");
        assert_eq!(found.of_other_kernels, other, "{preset} {card}");
    }
}

fn record(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("benches/records")
        .join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Every figure of the tables is in the record that it names.
#[test]
fn figures_are_those_of_their_records() {
    for row in lines(include_str!("speeds.csv")) {
        let [_, _, _, _, tok_s, _, _, named] = row[..] else {
            panic!("{row:?}");
        };
        assert!(record(named).contains(tok_s), "{tok_s} in {named}");
    }
    for row in lines(include_str!("cpu.csv")) {
        let [_, _, what, rate, named] = row[..] else {
            panic!("{row:?}");
        };
        let both = 2.0 * rate.parse::<f64>().unwrap();
        let figure = if what == "prompt" {
            format!("{both:.2}")
        } else {
            rate.to_owned()
        };
        assert!(record(named).contains(&figure), "{figure} in {named}");
    }
    for row in lines(include_str!("hits.csv")) {
        let [share, found, named] = row[..] else {
            panic!("{row:?}");
        };
        let both = format!(",{share},{found},");
        assert!(record(named).contains(&both), "{both} in {named}");
    }
    for row in lines(include_str!("quality.csv")) {
        let [_, kld, named] = row[..] else {
            panic!("{row:?}");
        };
        assert!(record(named).contains(kld), "{kld} in {named}");
    }
}

/// The bytes in the table of speeds, which plans say; with NQ_WRITE_SPEEDS they are written.
#[test]
fn bytes_of_the_table_of_speeds_are_what_plans_say() {
    if !gpu::BUILT_IN {
        println!("skipped: no CUDA in this build");
        return;
    }
    let table = include_str!("speeds.csv");
    let planned = table.lines().map(|line| {
        let mut row: Vec<String> = line.split(',').map(str::to_owned).collect();
        if row.get(3).is_some_and(|what| what == "decode") {
            let c = shape(&row[1]);
            let file = FileKind::all(&c)
                .unwrap()
                .into_iter()
                .find(|f| f.codes == row[2]);
            let asked = FitQuestion {
                config: &c,
                machine: &with("H200"),
                wanted: ONE,
                beside: Beside::default(),
            };
            let spec = asked.session(KvType::F16);
            let all = usize::MAX / 2;
            let kinds = &*file.expect("codes").kinds;
            let placed = gpu::place(&c, kinds, &spec, &[all], all).unwrap();
            row[5] = placed.read.to_string();
        }
        row.join(",") + "\n"
    });
    let planned: String = planned.collect();
    if std::env::var_os("NQ_WRITE_SPEEDS").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/fit/speeds.csv");
        std::fs::write(path, &planned).unwrap();
    }
    let differs = table.lines().zip(planned.lines()).find(|(a, b)| a != b);
    assert_eq!(differs, None, "run this test with NQ_WRITE_SPEEDS=1");
}

/// Speeds of an H100, none of which the tables of its kernels were made from, within 15 % of those measured.
#[test]
fn speeds_of_another_card_are_within_15_percent() {
    let h100 = with("H100 SXM");
    let short = Use {
        context: 640,
        clients: 1,
    };
    let imitated = "2026-11-26-gpu-imitated-h100.csv";
    for (preset, flags, measured, named) in [
        ("qwen3-0.6b", "--bits 4 --simple", "2647", imitated),
        ("qwen3-4b", "--bits 4 --simple", "1129", imitated),
        ("qwen3-8b", "--bits 4 --simple", "645.2", imitated),
        ("qwen3-14b", "--bits 4 --simple", "369.0", imitated),
        ("qwen3-8b", "--bits 4", "580.4", imitated),
        ("qwen3-8b", "--bits 8", "337.6", imitated),
        ("qwen3-8b", "", "190.9", imitated),
        ("qwen3-30b-a3b", "--bits 4 --simple", "806.0", imitated),
        (
            "qwen3.5-27b",
            "--bits 4 --simple",
            "186.36",
            "2026-11-28-gpu-drafts-h100.csv",
        ),
        (
            "qwen3.5-9b",
            "--bits 4 --simple",
            "551.02",
            "2026-11-28-gpu-drafts-h100.csv",
        ),
        (
            "qwen3.5-35b-a3b",
            "--bits 4 --simple",
            "802.94",
            "2026-11-28-gpu-drafts-h100.csv",
        ),
        (
            "qwen3-32b",
            "--bits 4 --simple",
            "155.24",
            "2026-11-28-gpu-drafts-h100.csv",
        ),
    ] {
        assert!(record(named).contains(measured), "{measured} in {named}");
        let row = row(preset, flags, short, &h100);
        let computed = row.tok_s.unwrap_or_else(|| panic!("{preset} {flags}"));
        let off = computed / measured.parse::<f64>().unwrap() - 1.0;
        println!(
            "{preset} {flags}: computed {computed:.1}, measured {measured}, {:+.1} %",
            100.0 * off
        );
        assert!(off.abs() < 0.15, "{preset} {flags}: {computed} {measured}");
    }
    for (depth, measured) in [(8192, 503.3), (32768, 317.1)] {
        let deep = Use {
            context: depth,
            clients: 1,
        };
        let full = row("qwen3-8b", "--bits 4 --simple", deep, &h100)
            .tok_s_full
            .unwrap();
        println!("qwen3-8b at depth {depth}: computed {full:.1}, measured {measured}");
        assert!(
            (full / measured - 1.0f64).abs() < 0.15,
            "{depth}: {full} {measured}"
        );
    }
}

/// Two cores at the bandwidths of the records' runs.
#[test]
fn speeds_of_cores_are_within_15_percent() {
    let others = "2026-11-21-cpu-against-others.csv";
    for (preset, read, measured, named) in [
        ("qwen3-0.6b", 34.6, "77.74", others),
        ("qwen3-1.7b", 33.7, "28.98", others),
        ("qwen3-30b-a3b", 46.6, "20.95", "2026-11-23-cpu-mixture.csv"),
        ("qwen3-30b-a3b", 78.8, "25.96", "2026-11-23-cpu-mixture.csv"),
    ] {
        assert!(record(named).contains(measured), "{measured} in {named}");
        let cores = Machine {
            cards: None,
            host: host(read, 2, Isa::Avx512Bf16),
        };
        let computed = row(preset, "--bits 4 --simple", ONE, &cores).tok_s.unwrap();
        let off = computed / measured.parse::<f64>().unwrap() - 1.0;
        println!(
            "{preset} at {read} GB/s: computed {computed:.2}, measured {measured}, {:+.1} %",
            100.0 * off
        );
        assert!(off.abs() < 0.15, "{preset}: {computed} {measured}");
    }
}

/// The bytes of docs/cards.csv, which a test of nq-quantize writes from plans of loading.
#[test]
fn bytes_are_those_of_the_table_of_cards() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/cards.csv");
    let table = std::fs::read_to_string(path).unwrap();
    if !gpu::BUILT_IN {
        println!("skipped: no CUDA in this build");
        return;
    }
    for preset in ["qwen3-0.6b", "qwen3-8b", "qwen3.8-27b", "qwen3-30b-a3b"] {
        let config = &shape(preset);
        let asked = FitQuestion {
            config,
            machine: &with("B200"),
            wanted: Use {
                context: 16384,
                clients: 1,
            },
            beside: Beside::default(),
        };
        let files = FileKind::all(config).expect("schemes that fit");
        for flags in ["--bits 4", "--bits 8", "--trellis"] {
            let file = files.iter().find(|f| f.flags == flags);
            let row = asked.row(file.expect("a kind of file"), KvType::F16);
            let row = row.expect("a row");
            let line = format!(
                "{preset},{flags},f16,16384,{},{},{},",
                row.weights_bytes, row.kv_bytes, row.buffers_bytes
            );
            assert!(row.fits && table.contains(&line), "{line}");
        }
    }
}

#[test]
fn experts_are_in_memory_as_loading_places_them() {
    if !gpu::BUILT_IN {
        println!("skipped: no CUDA in this build");
        return;
    }
    let c = shape("qwen3-30b-a3b");
    let fits = row("qwen3-30b-a3b", "--bits 4", ONE, &with("RTX 4090"));
    assert!(fits.fits && fits.gpu_experts.is_none(), "{fits:?}");
    // Else all are in the computer's memory, and some of each layer on the card.
    let machine = with("RTX 4070");
    let small = row("qwen3-30b-a3b", "--bits 4", ONE, &machine);
    let most = c.experts.unwrap().count;
    let here = small.gpu_experts.unwrap();
    assert!(small.fits && here > 0 && here < most, "{small:?}");
    assert_eq!(small.cpu_layers, 0);
    let free = machine.cards.as_ref().unwrap().free_bytes;
    assert!(small.needed_bytes <= free);
    // One more of each layer would not fit: codes and scales of its two products each take whole pages of 2 MiB.
    let each = (small.cpu_bytes / most + c.num_hidden_layers * 4 * (2 << 20)) as u64;
    assert!(small.needed_bytes + each > free, "{small:?}");
    assert!(small.cpu_bytes > fits.weights_bytes - small.weights_bytes);
    assert_eq!(small.read_bytes, fits.read_bytes);
    // Over half as wide a bus, what is waited for takes twice as long.
    let with_bus = |copied_gb_s| Machine {
        cards: machine.cards.clone().map(|cards| Cards {
            copied_gb_s,
            ..cards
        }),
        ..machine.clone()
    };
    let seconds = |machine: &Machine| {
        let row = row("qwen3-30b-a3b", "--bits 4", ONE, machine);
        row.tok_s.map(|tok_s| 1.0 / tok_s)
    };
    let [wide, narrow, endless] = [20.0, 10.0, 1e9].map(|b| seconds(&with_bus(Some(b))).unwrap());
    assert!(((narrow - endless) / (wide - endless) - 2.0).abs() < 1e-3);
    assert!(seconds(&with_bus(None)).is_none());
    // What files do not say the schemes of has the experts of whole layers on the CPU.
    let rich = Machine {
        host: Host {
            free_bytes: 128_000_000_000,
            ..machine.host.clone()
        },
        ..machine.clone()
    };
    let whole = row("qwen3-30b-a3b", "", ONE, &rich);
    assert!(whole.fits && whole.gpu_experts.is_none(), "{whole:?}");
    assert!((1..=c.num_hidden_layers).contains(&whole.cpu_layers));
    // With too little memory in the computer, it does not fit.
    let poor = Machine {
        host: Host {
            free_bytes: 1_000_000_000,
            ..machine.host
        },
        ..machine
    };
    let none = row("qwen3-30b-a3b", "--bits 4", ONE, &poor);
    assert!(!none.fits && none.why_not.unwrap().contains("experts"));
}

#[test]
fn two_cards_hold_what_one_does_not() {
    if !gpu::BUILT_IN {
        println!("skipped: no CUDA in this build");
        return;
    }
    let one = row("qwen3-32b", "--bits 5", ONE, &with("RTX 3090"));
    let two = row("qwen3-32b", "--bits 5", ONE, &with("2 x RTX 3090"));
    assert!(!one.fits && two.fits, "{one:?} {two:?}");
    assert!(two.needed_bytes < one.needed_bytes);
    // A token passes both, so they are no faster than one that had room.
    assert_eq!(
        two.read_bytes,
        row("qwen3-32b", "--bits 5", ONE, &with("H200")).read_bytes
    );
}

#[test]
fn clients_take_memory_and_share_reading() {
    let four = Use {
        context: 8192,
        clients: 4,
    };
    let cores = Machine {
        cards: None,
        host: host(50.0, 2, Isa::Avx512Bf16),
    };
    let (alone, among) = (
        row("qwen3-0.6b", "--bits 4", ONE, &cores),
        row("qwen3-0.6b", "--bits 4", four, &cores),
    );
    assert_eq!(among.kv_bytes, 4 * alone.kv_bytes);
    assert!(among.tok_s_all.is_none(), "no record says");
    let many = Use {
        context: 32768,
        clients: 64,
    };
    let refused = row("qwen3-0.6b", "--bits 4", many, &cores);
    assert!(!refused.fits && refused.why_not.is_some());
    if gpu::BUILT_IN {
        let served = row("qwen3-8b", "--bits 4", four, &with("RTX 4090"));
        assert!(served.fits && served.tok_s_all > served.tok_s, "{served:?}");
    }
}

/// Cores of which no record has the speed get none, rather than that of others.
#[test]
fn what_no_record_has_is_not_claimed() {
    let cores = Machine {
        cards: None,
        host: host(50.0, 2, Isa::Scalar),
    };
    let unknown = row("qwen3-0.6b", "--bits 4", ONE, &cores);
    assert!(unknown.fits && unknown.tok_s.is_none() && unknown.prompt_tok_s.is_none());
    let cores = Machine {
        cards: None,
        host: host(50.0, 2, Isa::Avx2),
    };
    let known = row("qwen3-0.6b", "--bits 4", ONE, &cores);
    assert!(known.tok_s.is_some() && known.prompt_tok_s.is_none());
    if gpu::BUILT_IN {
        let card = row("qwen3-8b", "--bits 4", ONE, &with("RTX 4090"));
        assert!(card.tok_s.is_some() && card.prompt_tok_s.is_none());
        let coded = row("qwen3-8b", "--trellis", ONE, &with("RTX 4090"));
        assert!(coded.fits && coded.tok_s.is_none(), "{coded:?}");
        let coded = row("qwen3-8b", "--trellis", ONE, &with("H100 SXM"));
        assert!(coded.tok_s.is_some(), "{coded:?}");
        assert_eq!(coded.prompt_tok_s, Some(22098.0));
        let coded = row("qwen3-8b", "--trellis --bits 3", ONE, &with("H100 SXM"));
        assert!(coded.tok_s.is_some() && coded.prompt_tok_s.is_none());
    }
}

#[test]
fn the_best_file_is_the_one_of_least_loss_that_is_fast_enough() {
    let plain = row(
        "qwen3-0.6b",
        "",
        ONE,
        &Machine {
            cards: None,
            host: host(50.0, 2, Isa::Avx512Bf16),
        },
    );
    let imagined = |file: &str, kld: f64, tok_s: f64, fits: bool| FileRow {
        file: file.into(),
        kld: Some(kld),
        tok_s_full: Some(tok_s),
        fits,
        ..plain.clone()
    };
    let chosen = |rows: &[FileRow]| best(rows).map(|r| r.file.clone());
    let eight = imagined("8", 0.0002, 40.0, true);
    let four = imagined("4", 0.016, 80.0, true);
    let whole = imagined("16", 0.0, 22.0, true);
    // The fastest of those that nobody can tell from the source.
    let rows = [four.clone(), eight.clone(), whole.clone()];
    assert_eq!(chosen(&rows).as_deref(), Some("8"));
    // The others are too slow to read along.
    let slow = imagined("8", 0.0002, 12.0, true);
    assert_eq!(chosen(&[four.clone(), slow.clone()]).as_deref(), Some("4"));
    // None is fast enough: the fastest that loses no more than 4 bits do, of which a record says what it loses.
    let three = imagined("3", 0.06, 18.0, true);
    let unknown = FileRow {
        kld: None,
        ..imagined("2", 0.0, 19.0, true)
    };
    let rows = [imagined("4", 0.016, 15.0, true), slow, three, unknown];
    assert_eq!(chosen(&rows).as_deref(), Some("4"));
    assert_eq!(chosen(&rows[3..]).as_deref(), Some("2"));
    // What does not fit is not proposed.
    let three = imagined("3", 0.06, 90.0, true);
    assert_eq!(
        chosen(&[imagined("4", 0.016, 80.0, false), three]).as_deref(),
        Some("3")
    );
    assert_eq!(chosen(&[imagined("4", 0.016, 80.0, false)]), None);
    // Keys and values in 8 bits only where others do not fit.
    let kv8 = FileRow {
        kv: "int8".into(),
        tok_s_full: Some(90.0),
        ..four.clone()
    };
    assert_eq!(
        best(&[four, kv8]).map(|r| r.kv.clone()).as_deref(),
        Some("f16")
    );
}
