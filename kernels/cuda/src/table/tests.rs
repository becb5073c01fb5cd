//! Compares the table with the sources: `kernels/cuda`, the tests and the benches.

use super::table;
use crate::PackedKind;
use crate::driver::targets;
use crate::kernel::{KINDS, MOST_INSTANCES, SCHEMES, kind_index, names};
use nq_formats::{Bits, Zeros};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A C macro with parameters.
struct Macro {
    parameters: Vec<String>,
    body: String,
}

/// The arguments of a call whose parenthesis begins `text`, and the text after it.
fn arguments(text: &str) -> (Vec<String>, &str) {
    let mut depth = 0;
    let mut all = vec![String::new()];
    for (i, c) in text.char_indices() {
        match c {
            '(' if depth == 0 => depth = 1,
            ')' if depth == 1 => {
                let all = all.iter().map(|a| a.trim().to_owned()).collect();
                return (all, &text[i + 1..]);
            }
            ',' if depth == 1 => all.push(String::new()),
            c => {
                depth += i32::from(c == '(') - i32::from(c == ')');
                all.last_mut().unwrap().push(c);
            }
        }
    }
    panic!("a call without an end: {text:.80}");
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Splits `text` into words and the text between them.
fn words(text: &str) -> Vec<&str> {
    let mut all = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let same = |c: char| is_word(c) == is_word(first);
        let end = rest.find(|c| !same(c)).unwrap_or(rest.len());
        all.push(&rest[..end]);
        rest = &rest[end..];
    }
    all
}

/// The expansion of a call of `m`: parameters replaced, `##` pasted.
fn expanded(m: &Macro, given: &[String]) -> String {
    let replaced = words(&m.body).into_iter().map(|word| {
        let place = m.parameters.iter().position(|p| p == word);
        place.map_or(word, |i| given[i].as_str())
    });
    replaced.collect::<String>().replace("##", "")
}

/// The source with its macros expanded.
fn preprocessed(source: &str) -> String {
    let source = source.replace("\\\n", " ");
    let mut macros: HashMap<String, Macro> = HashMap::new();
    let mut out = String::new();
    for line in source.lines() {
        let line = line.split("//").next().unwrap_or_default();
        let Some(definition) = line.trim().strip_prefix("#define ") else {
            let mut text = line.to_owned();
            // Repeated for macros that are used in macros.
            for _ in 0..4 {
                text = calls_replaced(&text, &macros);
            }
            out += &text;
            out.push('\n');
            continue;
        };
        let end = definition.find(|c| !is_word(c)).unwrap_or(definition.len());
        if definition[end..].starts_with('(') {
            let (parameters, body) = arguments(&definition[end..]);
            let body = body.to_owned();
            macros.insert(definition[..end].into(), Macro { parameters, body });
        }
    }
    out
}

fn calls_replaced(text: &str, macros: &HashMap<String, Macro>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let word = words(rest)[0];
        rest = &rest[word.len()..];
        match macros.get(word) {
            Some(m) if rest.starts_with('(') => {
                let (given, behind) = arguments(rest);
                out += &expanded(m, &given);
                out.push(' ');
                rest = behind;
            }
            _ => out += word,
        }
    }
    out
}

/// Names of the kernels that a source defines.
fn defined(source: &str) -> Vec<String> {
    let text = preprocessed(source);
    let kernels = text.split("extern \"C\" __global__").skip(1);
    kernels
        .map(|k| {
            let mut k = k.trim_start();
            if let Some(bounds) = k.strip_prefix("__launch_bounds__") {
                k = arguments(bounds).1.trim_start();
            }
            let k = k
                .strip_prefix("void")
                .expect("kernels return nothing")
                .trim_start();
            let mut k = k;
            if let Some(bounds) = k.strip_prefix("__launch_bounds__") {
                k = arguments(bounds).1.trim_start();
            }
            k.chars().take_while(|&c| is_word(c)).collect()
        })
        .collect()
}

#[test]
fn macros_are_replaced() {
    let source = "#define ONE(name, n) \\\n  extern \"C\" __global__ __launch_bounds__(n * (2)) void name(int x) { f<n>(); }\n\
                  #define BOTH(name) ONE(name##_a, 1) ONE(name##_b, 2)  // both\n\
                  BOTH(k)\nextern \"C\" __global__ void __launch_bounds__(256) last(A p) {}\n";
    assert_eq!(defined(source), ["k_a", "k_b", "last"]);
}

/// Every kernel has a row in the source that it names, and every row's kernels exist.
#[test]
fn rows_are_the_kernels_of_the_sources() {
    let mut sources: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for entry in fs::read_dir(workspace().join("kernels/cuda")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "cu") {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            // The lists of schemes, which are macros.
            let headers = ["weights.cuh", "trellis.cuh", "exl3.cuh"];
            let header: String = headers
                .map(|h| read(&workspace().join("kernels/cuda").join(h)))
                .concat();
            let kernels = defined(&(header + &read(&path)));
            let count = kernels.len();
            let kernels: BTreeSet<String> = kernels.into_iter().collect();
            assert_eq!(kernels.len(), count, "{name} defines a kernel twice");
            sources.insert(name, kernels);
        }
    }
    let mut rows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for row in table() {
        let instances = rows.entry(row.source.into()).or_default();
        for &instance in row.instances {
            assert!(instances.insert(instance.into()), "{instance} has two rows");
        }
    }
    for (source, kernels) in &sources {
        let none = BTreeSet::new();
        let listed = rows.get(source).unwrap_or(&none);
        let without: Vec<_> = kernels.difference(listed).collect();
        assert!(without.is_empty(), "{source}: without a row: {without:?}");
        let absent: Vec<_> = listed.difference(kernels).collect();
        assert!(
            absent.is_empty(),
            "{source}: rows without a kernel: {absent:?}"
        );
    }
    assert!(
        rows.keys().all(|s| sources.contains_key(s)),
        "{:?}",
        rows.keys()
    );
    let all: usize = rows.values().map(BTreeSet::len).sum();
    assert!(
        (200..MOST_INSTANCES).contains(&all),
        "{all} kernels were found"
    );
}

#[test]
fn rows_have_numbers_of_their_own() {
    let mut seen = BTreeSet::new();
    for row in table() {
        for instance in 0..row.instances.len() {
            assert!(seen.insert(row.number(instance)), "{}", row.name);
        }
    }
    let all: usize = table().map(|row| row.instances.len()).sum();
    assert_eq!((seen.len(), seen.last()), (all, Some(&(all - 1))));
}

/// A little-endian number of `N` bytes.
fn number<const N: usize>(bytes: &[u8], at: usize) -> usize {
    let mut all = [0u8; 8];
    all[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(all) as usize
}

/// Argument sizes of the kernels in a fatbin's ELF image: for each kernel, section
/// `.nv.info.NAME` holds attributes, of which number 0x17 (EIATTR_KPARAM_INFO, as
/// `cuobjdump -elf` shows it) describes an argument: its size is the upper 14 of 96 bits.
fn argument_sizes(fatbin: &[u8]) -> Vec<(String, usize)> {
    let start = fatbin
        .windows(4)
        .position(|w| w == b"\x7fELF")
        .expect("an ELF image");
    let elf = &fatbin[start..];
    let (table, entry) = (number::<8>(elf, 0x28), number::<2>(elf, 0x3a));
    let (count, names) = (number::<2>(elf, 0x3c), number::<2>(elf, 0x3e));
    let section = |i: usize| {
        let at = table + i * entry;
        let (offset, size) = (number::<8>(elf, at + 0x18), number::<8>(elf, at + 0x20));
        (number::<4>(elf, at), &elf[offset..], size)
    };
    let names = section(names).1;
    let mut sizes = Vec::new();
    for (name, content, size) in (0..count).map(section) {
        let name = names[name..].split(|&b| b == 0).next().unwrap();
        let Some(kernel) = name.strip_prefix(b".nv.info.") else {
            continue;
        };
        let mut at = 0;
        while at < size {
            let (format, attribute) = (content[at], content[at + 1]);
            if attribute == 0x17 {
                let size = number::<4>(content, at + 4 + 8) >> 18;
                sizes.push((String::from_utf8_lossy(kernel).into_owned(), size));
            }
            // Format 4: a size, followed by that many bytes.
            let behind = match format {
                4 => number::<2>(content, at + 2),
                _ => 0,
            };
            at += 4 + behind;
        }
    }
    sizes
}

/// The embedded code takes structures of the sizes given in the rows, for every architecture of this
/// build.
#[test]
fn arguments_have_the_sizes_that_the_code_takes() {
    let mut sizes: HashMap<&str, usize> = HashMap::new();
    for row in table() {
        sizes.extend(row.instances.iter().map(|&name| (name, row.args)));
    }
    let mut found = BTreeSet::new();
    for target in targets().filter(|t| !t.is_ptx()) {
        for fatbin in target.images().expect("whole code") {
            for (kernel, size) in argument_sizes(&fatbin) {
                let expected = sizes.get(kernel.as_str());
                assert_eq!(expected, Some(&size), "argument of {kernel}");
                assert!(found.insert((target.name(), kernel)), "two arguments");
            }
        }
    }
    assert!(
        found.len() > 200,
        "{} kernels are in this build",
        found.len()
    );
}

/// True if `source` defines the function `name`, as a test if `tested`.
fn has_function(source: &str, name: &str, tested: bool) -> bool {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let at = lines.iter().position(|l| {
        let l = l.strip_prefix("pub(crate) ").unwrap_or(l);
        let l = l.strip_prefix("pub(super) ").unwrap_or(l);
        l.strip_prefix("fn ")
            .is_some_and(|l| l.starts_with(&format!("{name}(")))
    });
    at.is_some_and(|at| !tested || (at > 0 && lines[at - 1] == "#[test]"))
}

/// Each row names an existing test and bench, and no two kernels of different rows have the same
/// name.
#[test]
fn rows_have_tests_and_benches() {
    let mut names = BTreeSet::new();
    let benches: String = fs::read_dir(workspace().join("kernels/cuda/benches/cuda"))
        .unwrap()
        .map(|entry| read(&entry.unwrap().path()))
        .collect();
    for row in table() {
        assert!(names.insert(row.name), "two rows of {}", row.name);
        let (file, function) = row.test.split_once("::").expect("file::function");
        let source = read(&workspace().join(file));
        assert!(
            has_function(&source, function, true),
            "{}: {}",
            row.name,
            row.test
        );
        assert!(
            has_function(&benches, row.bench, false),
            "{}: {}",
            row.name,
            row.bench
        );
        assert!(
            benches.contains(&format!("(\"{}\", ", row.bench)),
            "{} is not run",
            row.bench
        );
    }
}

/// The order of kinds matches the names of instances.
#[test]
fn kinds_have_the_names_of_their_instances() {
    let names: &[&str] = names!(kinds "k"; "_a", "_b");
    assert_eq!(names.len(), 2 * KINDS);
    assert_eq!(names[kind_index(PackedKind::Fp16)], "k_fp16_a");
    let affine: &[&str] = names!(schemes "k"; "_a", "_b");
    let check = |kind, name: String| {
        assert_eq!(names[KINDS + kind_index(kind)], name);
        assert_eq!(affine[SCHEMES + kind_index(kind)], name);
    };
    for (bits, width) in [(Bits::B4, 4), (Bits::B8, 8)] {
        for (zeros, zero) in [
            (Zeros::None, "sym"),
            (Zeros::Integer, "int"),
            (Zeros::Offset, "offset"),
        ] {
            let slots = [(8, 32), (4, 64), (2, 64), (1, 64)];
            let all = if zero == "offset" && width == 8 { 1 } else { 4 };
            for &(groups, slot) in &slots[..all] {
                let kind = PackedKind::Affine {
                    bits,
                    zeros,
                    groups,
                    two_level: false,
                    table: false,
                };
                check(kind, format!("k_int{width}_{zero}_{slot}_b"));
            }
        }
    }
    for (bits, zeros, name) in [
        (Bits::B4, Zeros::Integer, "int4_int"),
        (Bits::B5, Zeros::Integer, "int5_int"),
        (Bits::B6, Zeros::None, "int6_sym"),
    ] {
        for (groups, slot) in [(8, 32), (4, 64), (2, 64), (1, 64)] {
            let kind = PackedKind::Affine {
                bits,
                zeros,
                groups,
                two_level: true,
                table: false,
            };
            check(kind, format!("k_{name}_{slot}_scales8_b"));
        }
    }
    for (bits, zeros, groups, two_level, table) in [
        (Bits::B4, Zeros::Offset, 8, true, false),
        (Bits::B6, Zeros::None, 16, true, false),
        (Bits::B6, Zeros::Offset, 16, true, false),
        (Bits::B3, Zeros::None, 16, true, true),
        (Bits::B4, Zeros::None, 16, false, true),
        (Bits::B2, Zeros::Offset, 16, true, false),
        (Bits::B8, Zeros::Offset, 16, true, false),
    ] {
        let kind = PackedKind::Affine {
            bits,
            zeros,
            groups,
            two_level,
            table,
        };
        check(kind, "k_blocks_b".into());
    }
}
