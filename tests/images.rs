//! Models that see, through the real binary: what is said of them, and what they take.

use crate::common::{command, nq, peak, stderr};
use nq_answers::images::message_with_images;
use nq_model::vision::VisionConfig;
use nq_testkit::sees::{tower, write};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A picture of one colour that changes from left to right, as a BMP file.
fn bmp(width: u32, height: u32) -> Vec<u8> {
    let line = (3 * width).next_multiple_of(4);
    let mut file = b"BM".to_vec();
    let fields = [54 + line * height, 0, 54, 40, width, height, 1 | 24 << 16];
    let rest = [0, line * height, 2835, 2835, 0, 0];
    let words = fields.into_iter().chain(rest);
    words.for_each(|word| file.extend(word.to_le_bytes()));
    for _ in 0..height {
        file.extend((0..line).map(|x| (x * 7 % 251) as u8));
    }
    file
}

/// A model whose tower and images take far more memory than the text model and the program, and an image of as many
/// tokens as it may have.
fn large(folder: &Path) -> (PathBuf, PathBuf) {
    let (model, image) = (folder.join("sees"), folder.join("image.bmp"));
    write(&model, |tokens| {
        let mut c = VisionConfig {
            depth: 1,
            hidden_size: 768,
            intermediate_size: 1024,
            num_heads: 12,
            ..tower(tokens)
        };
        c.pixels.most = 1024 * 64;
        c
    });
    std::fs::write(&image, bmp(256, 256)).unwrap();
    (model, image)
}

#[test]
fn inspect_says_what_a_model_sees_with() {
    let home = tempfile::tempdir().unwrap();
    let (model, _) = large(home.path());
    let model = model.to_str().unwrap();
    let out = nq(home.path(), &["inspect", model, "--json"]);
    assert!(out.status.success(), "{}", stderr(&out));
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    let vision = &report["vision"];
    let found = [
        "blocks",
        "hidden_size",
        "token_side",
        "min_tokens",
        "max_tokens",
    ];
    assert_eq!(
        found.map(|key| vision[key].as_u64().unwrap()),
        [1, 768, 8, 4, 1024]
    );
    let of_tower = report["tensors"].as_array().unwrap().iter();
    let of_tower = of_tower.filter(|t| t["name"].as_str().unwrap().starts_with("model.visual."));
    let bytes: u64 = of_tower.map(|t| t["tensor_bytes"].as_u64().unwrap()).sum();
    assert_eq!(vision["bytes"], bytes);
    assert_eq!(vision["parameters"], bytes / 4);
    let weights = vision["memory"]["weights_bytes"].as_u64().unwrap();
    assert!(
        (bytes..bytes * 11 / 10).contains(&weights),
        "{weights} of {bytes}"
    );
    let out = nq(home.path(), &["inspect", model]);
    let text = String::from_utf8(out.stdout).unwrap();
    let line = "  images           4 to 1024 tokens, one for 8 x 8 pixels\n";
    assert!(text.contains(line), "{text}");
}

/// The memory that `-v` says for images is what an image of the most tokens adds, to 15 %.
#[test]
fn the_memory_said_for_images_is_the_memory_taken() {
    let home = tempfile::tempdir().unwrap();
    let (model, image) = large(home.path());
    let run = |images: &[&str]| {
        let [model, image] = [&model, &image].map(|path| path.to_str().unwrap());
        let asked = [
            "chat",
            model,
            "--device",
            "cpu",
            "-v",
            "-p",
            "Look.",
            "--max-tokens",
            "4",
        ];
        let asked = [&asked[..], &["--temperature", "0"]].concat();
        let image: Vec<&str> = images.iter().flat_map(|flag| [*flag, image]).collect();
        let (peak, output) = peak(&mut command(home.path(), &[asked, image].concat()));
        (peak, stderr(&output))
    };
    let (without, _) = run(&[]);
    let (with, said) = run(&["--image"]);
    let line = said
        .lines()
        .find(|line| line.contains("for images: "))
        .unwrap();
    let parts: Vec<f64> = line
        .split("for images: ")
        .nth(1)
        .unwrap()
        .split(", ")
        .map(|part| {
            let (number, unit) = part.split_once(' ').unwrap();
            assert!(unit.starts_with("MB"), "{line}");
            number.parse().unwrap()
        })
        .take(2)
        .collect();
    let off = (with - without) / (parts[0] + parts[1]) - 1.0;
    assert!(
        off.abs() < 0.15,
        "{line}: {without} MB without an image, {with} with one"
    );
}

/// `nq doctor MODEL` says what a model and its images take here, and refuses what is no model.
#[test]
fn doctor_knows_the_tower_of_a_model() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("sees");
    write(&model, tower);
    let doctor = |name: &str| nq(home.path(), &["doctor", name, "--device", "cpu", "--json"]);
    let report = |name: &str| -> Value { serde_json::from_slice(&doctor(name).stdout).unwrap() };
    let found = report(model.to_str().unwrap());
    let (text, images) = (&found["model"], &found["model"]["images"]);
    assert_eq!(
        (&text["device"], &images["device"]),
        (&"cpu".into(), &"cpu".into())
    );
    let inspected = nq(home.path(), &["inspect", model.to_str().unwrap(), "--json"]);
    let inspected: Value = serde_json::from_slice(&inspected.stdout).unwrap();
    let tower = images["weights_bytes"].as_u64().unwrap();
    assert!(tower > 0 && images["largest_image_bytes"].as_u64().unwrap() > 0);
    assert_eq!(
        images["weights_bytes"],
        inspected["vision"]["memory"]["weights_bytes"]
    );
    let blind = report("demo");
    assert_eq!(blind["model"]["images"], Value::Null);
    assert!(blind["model"]["text_bytes"].as_u64().unwrap() > 8_000_000);
    let absent = doctor(home.path().join("absent").to_str().unwrap());
    assert!(!absent.status.success() && stderr(&absent).contains("absent"));
}

/// The tower of a preset has random weights, too.
#[test]
fn bench_draws_the_tower_of_a_preset() {
    let home = tempfile::tempdir().unwrap();
    let bench = |preset: &str| {
        let flags =
            "--bits 4 --simple --no-chat -p 0 -n 1 --repeats 1 --device cpu --image 64x64 --json";
        let bench = ["bench", "--preset", preset];
        nq(
            home.path(),
            &bench
                .into_iter()
                .chain(flags.split(' '))
                .collect::<Vec<_>>(),
        )
    };
    let rows: Value = serde_json::from_slice(&bench("qwen3.5-0.8b").stdout).unwrap();
    let image = &rows.as_array().unwrap().last().unwrap()["image"];
    assert_eq!(image["tokens"], 64, "{rows}"); // the least of an image
    let blind = bench("qwen3-0.6b");
    assert!(
        stderr(&blind).contains("reads text alone"),
        "{}",
        stderr(&blind)
    );
}

#[test]
fn bench_measures_the_first_token_behind_an_image() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("sees");
    write(&model, tower);
    let bench = |more: &[&str]| {
        let bench = [
            "bench",
            model.to_str().unwrap(),
            "--device",
            "cpu",
            "-p",
            "8",
            "-n",
            "4",
        ];
        let more = [&bench[..], &["--repeats", "2", "--no-chat"], more].concat();
        nq(home.path(), &more)
    };
    let out = bench(&["--image", "32x24", "--json"]);
    // A row that a busy machine makes invalid is still there.
    let rows: Value = serde_json::from_slice(&out.stdout).unwrap();
    let names: Vec<&str> = (rows.as_array().unwrap().iter())
        .map(|r| r["test"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["pp8", "tg4", "image32x24"]);
    let (row, times) = (&rows[2], &rows[2]["image"]);
    // Twelve squares of 8 by 8 pixels, between their start and end.
    assert_eq!((&times["tokens"], &row["depth"]), (&12.into(), &14.into()));
    let ms = |key: &str| times[key].as_f64().unwrap();
    let parts = ["pixels_ms", "encoding_ms", "prompt_ms"].map(ms);
    assert!(parts.iter().all(|ms| *ms > 0.0) && row["tok_s"].as_f64().unwrap() > 0.0);
    assert!(parts.iter().all(|part| *part <= ms("first_token_ms")));
    let table = bench(&["--image", "32x24"]);
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(
        table.contains("image32x24: 12 tokens; the first token behind it after "),
        "{table}"
    );

    let blind = nq(
        home.path(),
        &["bench", "demo", "--device", "cpu", "--image", "32x24"],
    );
    assert!(
        !blind.status.success() && stderr(&blind).contains("demo reads text alone"),
        "{}",
        stderr(&blind)
    );
    let sizes = bench(&["--image", "32"]);
    assert!(
        stderr(&sizes).contains("expected width x height"),
        "{}",
        stderr(&sizes)
    );
}

/// Chats in a file: a message of a user with an image by a path or as a data URL, and an answer.
fn chats(folder: &Path, image: &str) -> PathBuf {
    let answered = |message: Value| {
        let answer = json!({"role": "assistant", "content": "It is a river."});
        json!({"messages": [message, answer]}).to_string()
    };
    let text = "What is it?";
    let parts = json!([{"type": "image", "image": image}, {"type": "text", "text": text}]);
    let rows = [
        answered(json!({"role": "user", "content": parts})),
        answered(json!(message_with_images(&[bmp(24, 24)], text).unwrap())),
        json!({"messages": [{"role": "user", "content": "Name a river."}]}).to_string(),
    ];
    let path = folder.join("chats.jsonl");
    std::fs::write(&path, rows.join("\n")).unwrap();
    path
}

#[test]
fn eval_measures_chats_with_images() {
    let home = tempfile::tempdir().unwrap();
    let (model, pictures) = (home.path().join("sees"), home.path().join("data/pictures"));
    write(&model, tower);
    std::fs::create_dir_all(&pictures).unwrap();
    std::fs::write(pictures.join("wide.bmp"), bmp(40, 16)).unwrap();
    let mut other = bmp(40, 16);
    other[54..]
        .iter_mut()
        .for_each(|level| *level = 255 - *level);
    std::fs::write(pictures.join("other.bmp"), &other).unwrap();
    std::fs::write(home.path().join("outside.bmp"), &other).unwrap();
    std::os::unix::fs::symlink("../../outside.bmp", pictures.join("link.bmp")).unwrap();
    let model = model.to_str().unwrap();
    let eval = |image: &str, more: &[&str]| {
        let path = chats(&home.path().join("data"), image);
        let eval = [
            "eval",
            "--device",
            "cpu",
            "--json",
            "--text",
            path.to_str().unwrap(),
        ];
        nq(home.path(), &[&eval[..], more].concat())
    };
    let report = |image: &str, more: &[&str]| -> Value {
        let out = eval(image, more);
        assert!(out.status.success(), "{}", stderr(&out));
        serde_json::from_slice::<Value>(&out.stdout).unwrap()[0].take()
    };
    let found = report("pictures/wide.bmp", &[model, "--against", model]);
    assert_eq!(
        (&found["windows"], &found["protocol"]),
        (&3.into(), &"texts".into())
    );
    assert!(found["kld"]["max"].as_f64().unwrap() < 1e-9, "{found}");
    // An image changes the figures, its place and what is around it being the same.
    let seen = report("./pictures/other.bmp", &[model]);
    assert_eq!(seen["tokens"], found["tokens"]);
    assert_ne!(seen["ppl"], found["ppl"]);
    // Losses by quantizing are measured.
    let lossy = |name: &str, more: &[&str]| {
        let quantized = home.path().join(name);
        let quantized = quantized.to_str().unwrap();
        let quantize = [
            "quantize",
            model,
            "--bits",
            "4",
            "--method",
            "rtn",
            "--group-size",
            "32",
            "--head-bits",
            "16",
            "--device",
            "cpu",
            "--out",
            quantized,
        ];
        let out = nq(home.path(), &[&quantize[..], more].concat());
        assert!(out.status.success(), "{}", stderr(&out));
        let lossy = report("pictures/wide.bmp", &[quantized, "--against", model]);
        assert_eq!(lossy["tokens"], found["tokens"]);
        let out = nq(home.path(), &["inspect", quantized, "--json"]);
        let inspected: Value = serde_json::from_slice(&out.stdout).unwrap();
        let bytes = inspected["vision"]["bytes"].as_u64().unwrap();
        (lossy["kld"]["mean"].as_f64().unwrap(), bytes)
    };
    let (text, whole) = lossy("int4", &[]);
    assert!(text > 1e-6, "{text}");
    // Of the tower, too: the Linears whose rows are whole groups have 8.5 bits instead of 32.
    let (both, rounded) = lossy("int4-vision8", &["--vision-bits", "8"]);
    let weights = 2 * (3 * 32 * 32 + 32 * 32 + 48 * 32) + 128 * 128 + 96 * 128;
    assert_eq!(whole - rounded, weights * 47 / 16);
    assert!(both != text && both < 2.0 * text, "{both}, {text}");
    let out = nq(
        home.path(),
        &["quantize", "demo", "--vision-bits", "8", "--out", "none"],
    );
    let said = stderr(&out);
    assert!(
        !out.status.success() && said.contains("a model that sees images"),
        "{said}"
    );

    for (image, models, expected) in [
        ("../outside.bmp", &[model][..], "expected a path within"),
        ("pictures/link.bmp", &[model], "expected a path within"),
        ("/etc/hostname", &[model], "expected a path within"),
        ("pictures", &[model], "expected a path within"),
        (
            "pictures/none.bmp",
            &[model],
            "line 1 of chats.jsonl: image \"pictures/none.bmp\"",
        ),
        ("pictures/wide.bmp", &["demo"], "reads text alone"),
        (
            "pictures/wide.bmp",
            &[model, "--by-depth"],
            "chats are measured whole",
        ),
        (
            "pictures/wide.bmp",
            &[model, "--ctx", "20"],
            "tokens of a text: expected 2 to 20",
        ),
    ] {
        let out = eval(image, models);
        let said = stderr(&out);
        assert!(
            !out.status.success() && said.contains(expected),
            "{image}: {said}"
        );
    }
}

/// Rows of images are among what a model is calibrated on: other pixels give other weights. Chats that the model cannot
/// read are refused by their line.
#[test]
fn calibration_sees_images() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("sees");
    write(&model, tower);
    let chats = home.path().join("chats.jsonl");
    let quantize = |model: &str, place: &str, out: &str| {
        let image = json!({"type": "image", "image": place});
        let text = json!({"type": "text", "text": "What is it, and what colour has it?"});
        let chat = json!({"messages": [{"role": "user", "content": [image, text]},
            {"role": "assistant", "content": "Gray."}]});
        std::fs::write(&chats, format!("{chat}\n{chat}\n")).unwrap();
        let out = home.path().join(out);
        let [file, calib] = [&out, &chats].map(|path| path.to_str().unwrap());
        let asked = [
            "quantize", model, "--out", file, "--calib", calib, "--method", "gptq",
        ];
        // Its Linears have inputs that 64 does not divide.
        let rest = "--bits 4 --group-size 32 --head-bits 16 --no-measure --device cpu".split(' ');
        let rest: Vec<&str> = rest.collect();
        let done = nq(home.path(), &[&asked[..], &rest].concat());
        (done.status.success(), stderr(&done), out)
    };
    let model = model.to_str().unwrap();
    let weights = |place: &str| {
        let (done, said, out) = quantize(model, place, &format!("{place}.nq"));
        assert!(done, "{said}");
        std::fs::read(out.join("model.safetensors")).unwrap()
    };
    let light: Vec<u8> = bmp(64, 64).iter().map(|v| v | 0xc0).collect();
    let light = [&bmp(64, 64)[..54], &light[54..]].concat();
    std::fs::write(home.path().join("dark.bmp"), bmp(64, 64)).unwrap();
    std::fs::write(home.path().join("light.bmp"), light).unwrap();
    std::fs::copy(home.path().join("dark.bmp"), home.path().join("same.bmp")).unwrap();
    let differ = |a: &[u8], b: &[u8]| a.iter().zip(b).filter(|(a, b)| a != b).count();
    let dark = weights("dark.bmp");
    let (same, light) = (weights("same.bmp"), weights("light.bmp"));
    assert_eq!(differ(&dark, &same), 0);
    assert!(differ(&dark, &light) > 2000, "{}", differ(&dark, &light));
    for (model, place, expected) in [
        (
            model,
            "none.bmp",
            "line 1 of chats.jsonl: image \"none.bmp\"",
        ),
        (model, "../dark.bmp", "expected a path within"),
        (
            "demo",
            "dark.bmp",
            "line 1 of chats.jsonl: the model reads text alone",
        ),
    ] {
        let (done, said, _) = quantize(model, place, "refused.nq");
        assert!(!done && said.contains(expected), "{said}");
    }
}
