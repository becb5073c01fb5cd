use super::*;
use serde_json::{Value, json};

fn tools(several: bool) -> Tools {
    let strings = |names: &[&str]| {
        let properties = names
            .iter()
            .map(|n| ((*n).to_owned(), json!({"type": "string"})));
        json!({"type": "object", "properties": Value::Object(properties.collect())})
    };
    Tools {
        list: vec![
            (
                "f".into(),
                json!({"type": "object", "properties": {"a": {}}}),
            ),
            (
                "g".into(),
                json!({"type": "object", "properties": {"a": {}}}),
            ),
            ("write".into(), strings(&["path", "content", "zip"])),
        ],
        several,
    }
}

/// The text, and calls as (name, arguments).
type ParsedAnswer = (String, Vec<(String, String)>);

fn parse_with(tools: Tools, cut: bool, text: &str, size: usize) -> ParsedAnswer {
    let (mut parser, mut out) = (CallParser::new(tools), Vec::new());
    let chars: Vec<char> = text.chars().collect();
    for piece in chars.chunks(size) {
        parser.push(&piece.iter().collect::<String>(), &mut out);
    }
    parser.finish(cut, &mut out);
    let (mut text, mut calls) = (String::new(), Vec::new());
    for piece in out {
        match piece {
            Piece::Text(t) => text.push_str(&t),
            Piece::CallStart { index, name } => {
                assert_eq!(index, calls.len());
                calls.push((name, String::new()));
            }
            Piece::CallArguments { index, text } => {
                assert_eq!(index + 1, calls.len());
                calls[index].1.push_str(&text);
            }
            Piece::Reasoning(_) => unreachable!(),
        }
    }
    (text, calls)
}

fn check_with(several: bool, cut: bool, text: &str, plain: &str, calls: &[(&str, &str)]) {
    let owned = calls
        .iter()
        .map(|(n, a)| ((*n).to_owned(), (*a).to_owned()));
    let expected = (plain.to_owned(), owned.collect::<Vec<_>>());
    for size in 1..=text.chars().count() {
        let found = parse_with(tools(several), cut, text, size);
        assert_eq!(found, expected, "{text:?} by {size}");
    }
    for (_, arguments) in calls.iter().filter(|_| !cut) {
        serde_json::from_str::<Value>(arguments).unwrap_or_else(|e| panic!("{e}: {arguments}"));
    }
}

fn check(text: &str, plain: &str, calls: &[(&str, &str)]) {
    check_with(true, false, text, plain, calls);
}

/// JSON calls.
const F: &str = "{\"name\": \"f\", \"arguments\": {\"a\": 1}}";
const G: &str = "{\"name\": \"g\", \"arguments\": {\"a\": 2}}";
const BOTH: [(&str, &str); 2] = [("f", "{\"a\": 1}"), ("g", "{\"a\": 2}")];

#[test]
fn calls_are_the_same_whatever_the_pieces() {
    check(
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x} </tool_call> \\\" \u{e9}\", \"b\": [1, {}]}}\n</tool_call>",
        "",
        &[(
            "f",
            "{\"a\": \"x} </tool_call> \\\" \u{e9}\", \"b\": [1, {}]}",
        )],
    );
    check(
        "Let me see.\n\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n\
         <tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"g\"}</tool_call> done",
        "Let me see. done",
        &[("f", "{}"), ("g", "{\"a\": 1}")],
    );
    check(
        "<tool_call>\n<function=run>\n<parameter=line>\nls -l\n</parameter>\n\
         <parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
        "",
        &[("run", "{\"line\":\"ls -l\",\"n\":3}")],
    );
    check(
        "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>",
        "",
        &[("f", "{\"a\": 1}")],
    );
    check(
        "<tool_call>{\"id\": 7, \"name\": \"f\", \"parameters\": {\"n\": 12345678901234567890123}}</tool_call>",
        "",
        &[("f", "{\"n\": 12345678901234567890123}")],
    );
    check(
        "<tool_call>{\"name\": \"f\"}</tool_call>",
        "",
        &[("f", "{}")],
    );
    check(
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"id\": \"} </tool_call>\"}</tool_call> b",
        " b",
        &[("f", "{\"a\": 1}")],
    );
}

#[test]
fn integers_are_whole_however_deep_they_are() {
    let days = json!({"type": "array", "items": {"type": "integer"}});
    let trip = json!({"type": "object", "properties": {"days": days, "km": {"type": "number"}}});
    let tools = Tools {
        list: vec![("f".into(), json!({"properties": {"trip": trip}}))],
        several: true,
    };
    let expected = r#"{"days": [1, 2], "km": 3.0}"#;
    let written = r#"{"days": [1.0, 2.0], "km": 3.0}"#;
    for (text, between) in [
        (
            format!(
                "<tool_call>{{\"name\": \"f\", \"arguments\": {{\"trip\": {written}}}}}</tool_call>"
            ),
            " ",
        ),
        (
            format!(
                "<tool_call>{{\"arguments\": {{\"trip\": {written}}}, \"name\": \"f\"}}</tool_call>"
            ),
            " ",
        ),
        (
            format!(
                "<tool_call><function=f><parameter=trip>{written}</parameter></function></tool_call>"
            ),
            "",
        ),
    ] {
        let arguments = format!("{{\"trip\":{between}{expected}}}");
        for size in [1, text.len()] {
            let found = parse_with(tools.clone(), false, &text, size);
            assert_eq!(
                found,
                (String::new(), vec![("f".into(), arguments.clone())]),
                "{text}"
            );
        }
    }
}

#[test]
fn what_is_no_call_stays_text() {
    for text in [
        "a <tool_cal",
        "a < b",
        "a <function",
        "<tool_call>no call</tool_call> b",
        "<tool_call>{\"name\": 3}",
        "<tool_call>{\"name\": \"f\", \"arguments\": 3}</tool_call>",
        "Use <tool_call> to call, and </tool_call> to end.",
        "Write <function=f> or <function=other>\n<parameter=a>\n1\n</parameter>",
        "{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
        "{\"name\": \"f\", \"arguments\": {\"a\": 1}} is what I would write.",
        "{\"name\": \"f\"",
        "  {\"x\": 1}\n",
        "fn main() {\n    {\n    }\n}\n",
    ] {
        check(text, text, &[]);
    }
    check(
        &format!("Use <tool_call> for it.\n<tool_call>\n{F}\n</tool_call>"),
        "Use <tool_call> for it.",
        &BOTH[..1],
    );
}

#[test]
fn tags_may_be_missing_or_wrong() {
    check(
        &format!("<tool_call>\n{F}\n<tool_call>\n{G}\n</tool_call>"),
        "",
        &BOTH,
    );
    check(
        &format!("<tool_call>\n{F}\nThen I look."),
        "\nThen I look.",
        &BOTH[..1],
    );
    check(
        &format!("<tool_call>\n{F}\n</tool_calls>\nText."),
        "\nText.",
        &BOTH[..1],
    );
    check(
        &format!("So:\n{F}\n</tool_call>\n<tool_call>{G}"),
        "So:",
        &BOTH,
    );
    check(&format!("{F}\n</tool_call> b"), " b", &BOTH[..1]);
    // Without the last brace, or any.
    check(
        &format!("<tool_call>\n{}\n</tool_call> b", &F[..F.len() - 1]),
        " b",
        &BOTH[..1],
    );
    check(
        &format!("<tool_call>\n{}\n</tool_call> b", &F[..F.len() - 2]),
        " b",
        &BOTH[..1],
    );
    check(
        &format!("<tool_call>\n{}", &F[..F.len() - 2]),
        "",
        &BOTH[..1],
    );
    let function = "<function=write>\n<parameter=content>\na\n</parameter>\n</function>";
    let written: [(&str, &str); 1] = [("write", "{\"content\":\"a\"}")];
    for text in [
        format!("{function}\n</tool_call>"),
        function.to_owned(),
        format!("<tool_call>\n{function}"),
        function.replace("</parameter>\n", ""),
        format!(
            "<tool_call>{}</tool_call>",
            function.replace("\n</function>", "")
        ),
        function.replace("\n</function>", ""),
        function.replace("\n</parameter>\n</function>", ""),
        "<function=write>{\"content\":\"a\"}</function>".to_owned(),
    ] {
        check(&text, "", &written);
        check(&format!("I write it.\n\n{text}"), "I write it.", &written);
    }
    check(&format!("{function}\n\nDone."), "\n\nDone.", &written);
}

#[test]
fn a_block_may_hold_several_calls() {
    check(&format!("<tool_call>\n{F}\n{G}\n</tool_call>"), "", &BOTH);
    check(
        &format!("<tool_call>\n[{F}, {G}]\n</tool_call> b"),
        " b",
        &BOTH,
    );
    check(
        &format!("<tool_call>\n```json\n{F}\n```\n</tool_call>{G}"),
        "",
        &BOTH,
    );
    let f = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>";
    let g = "<function=g>\n<parameter=a>\n2\n</parameter>\n</function>";
    let calls = [("f", "{\"a\":1}"), ("g", "{\"a\":2}")];
    check(&format!("<tool_call>\n{f}\n{g}\n</tool_call>"), "", &calls);
    check(&format!("<tool_call>\n{f}\n<tool_call>\n{g}"), "", &calls);
    check(&format!("{}{g}", f.replace("</function>", "")), "", &calls);
    // After a call, a JSON object may be an answer.
    check(
        &format!("<tool_call>{F}</tool_call>\n{{\"x\": 1}}"),
        "\n{\"x\": 1}",
        &BOTH[..1],
    );
}

#[test]
fn strings_in_parameters_stay_as_written() {
    for value in [
        "{\"a\": 1}",
        "12345",
        "true",
        "\"x\"",
        "",
        "\n\nline\n",
        " \u{e9} \\ \t",
        "if a < b { \"</parameter>\" } // <parameter=x>",
        "see\n<parameter=other>\nand\n</function>\nand\n</tool_call>\nthere",
        "</parameter",
    ] {
        let text = format!(
            "<tool_call>\n<function=write>\n<parameter=content>\n{value}\n</parameter>\n\
             <parameter=zip>\n1e5\n</parameter>\n</function>\n</tool_call>"
        );
        let arguments = format!("{{\"content\":{},\"zip\":\"1e5\"}}", quoted(value));
        check(&text, "", &[("write", &arguments)]);
    }
    check(
        "<tool_call><function=write><parameter=zip>0 1</parameter></function></tool_call>",
        "",
        &[("write", "{\"zip\":\"0 1\"}")],
    );
    // A parameter without its end.
    check(
        "<tool_call>\n<function=write>\n<parameter=zip>\na\n<parameter=content>\nb\n</parameter>\n</function>\n</tool_call>",
        "",
        &[("write", "{\"zip\":\"a\",\"content\":\"b\"}")],
    );
    check(
        "<function=write>\n<parameter=path>\nx\n</parameter>\n<parameter=>\ny\n</parameter>\n</function>\n</tool_call>\nb",
        "<parameter=>\ny\nb",
        &[("write", "{\"path\":\"x\"}")],
    );
}

#[test]
fn arguments_are_valid_json() {
    check(
        "<tool_call>\n{\"name\": \"write\", \"arguments\": {\"path\": \"a\nb\", 'zip': True,}}\n</tool_call>",
        "",
        &[("write", "{\"path\": \"a\\nb\", \"zip\": true}")],
    );
    check(
        "<tool_call>\n{\"arguments\": {\"path\": \"a\nb\",}, \"name\": \"write\"}\n</tool_call>",
        "",
        &[("write", "{\"path\": \"a\\nb\"}")],
    );
    check(
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1 = 2}}</tool_call>",
        "= 2}}</tool_call>",
        &[("f", "{\"a\": 1}")],
    );
}

#[test]
fn a_call_that_is_cut_off_is_not_completed() {
    let cut = |text: &str, plain: &str, calls: &[(&str, &str)]| {
        check_with(true, true, text, plain, calls);
    };
    cut(
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": ",
        "",
        &[("f", "{\"a\":")],
    );
    cut(
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x",
        "",
        &[("f", "{\"a\": \"x")],
    );
    cut("<tool_call>\n{\"name\": \"f\", \"argum", "", &[("f", "")]);
    cut("Well.\n<tool_call>\n{\"na", "Well.", &[]);
    cut("Well.\n<tool_call>\n", "Well.", &[]);
    cut("Well.\n<tool_call>\n<function=f>\n", "Well.", &[]);
    cut("Well.\n<tool_c", "Well.\n<tool_c", &[]);
    cut(
        "<function=write>\n<parameter=zip>\nab\n</par",
        "",
        &[("write", "{\"zip\":\"ab")],
    );
    cut(
        "<function=f>\n<parameter=a>\n[1, 2",
        "",
        &[("f", "{\"a\":\"[1, 2\"")],
    );
    cut(
        "<function=f>\n<parameter=a>\n1\n</parameter>\n",
        "",
        &[("f", "{\"a\":1")],
    );
    // The model ended it.
    check(
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": ",
        "",
        &[("f", "{\"a\":null}")],
    );
}

#[test]
fn one_call_is_all_where_one_is_allowed() {
    let one = |text: &str, plain: &str, calls: &[(&str, &str)]| {
        check_with(false, false, text, plain, calls);
    };
    one(
        &format!("a <tool_call>{F}</tool_call><tool_call>{G}</tool_call>"),
        "a",
        &BOTH[..1],
    );
    one(&format!("<tool_call>{F}{G}</tool_call> b"), "", &BOTH[..1]);
    one("a <tool_call> b", "a <tool_call> b", &[]);
    let (mut parser, mut out) = (CallParser::new(tools(false)), Vec::new());
    parser.push(&format!("<tool_call>{F}"), &mut out);
    assert!(parser.is_over());
}

#[test]
fn arguments_stream() {
    let (mut parser, mut out) = (CallParser::new(tools(true)), Vec::new());
    parser.push(
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\"",
        &mut out,
    );
    assert_eq!(out.len(), 2, "{out:?}");
    parser.push(": \"x", &mut out);
    let text = "{\"a\": \"x".to_owned();
    assert_eq!(out[1], Piece::CallArguments { index: 0, text });

    let (mut parser, mut out) = (CallParser::new(tools(true)), Vec::new());
    parser.push(
        "<tool_call>\n<function=write>\n<parameter=content>\none\ntw",
        &mut out,
    );
    let text = "{\"content\":\"one\\ntw".to_owned();
    assert_eq!(out[1], Piece::CallArguments { index: 0, text });
}

#[test]
fn parameters_may_be_attributes_and_count_once() {
    let called = |arguments: &'static str| [("f", arguments)];
    check(
        "<tool_call>\n<function name=\"f\">\n<parameter name=\"a\">\n1\n</parameter>\n</function>\n</tool_call>",
        "",
        &called("{\"a\":1}"),
    );
    check(
        "<function name='f'><parameter name='a' string=\"true\">1</parameter></function>",
        "",
        &called("{\"a\":1}"),
    );
    check(
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n\
         <parameter=b>\n3\n</parameter>\n</function>\n</tool_call>",
        "",
        &called("{\"a\":1,\"b\":3}"),
    );
}

#[test]
fn braces_too_many_are_no_text() {
    for text in [
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}}}",
        "<tool_call>\n{{\"name\": \"f\", \"arguments\": {\"a\": 1}}}\n</tool_call>",
    ] {
        check(text, "", &[("f", "{\"a\": 1}")]);
    }
    check(
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n}\n</function>\n</tool_call>",
        "",
        &[("f", "{\"a\":1}")],
    );
}

#[test]
fn integers_are_written_without_a_point() {
    let count = json!({"type": "object", "properties": {"n": {"type": "integer"}, "x": {"type": "number"}}});
    let tools = || Tools {
        list: vec![("f".into(), count.clone())],
        several: true,
    };
    for (text, arguments) in [
        (
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 5.0, \"x\": 5.0}}\n</tool_call>",
            "{\"n\": 5, \"x\": 5.0}",
        ),
        (
            "<tool_call>\n<function=f>\n<parameter=n>\n5.0\n</parameter>\n<parameter=x>\n5.0\n</parameter>\n</function>\n</tool_call>",
            "{\"n\":5,\"x\":5.0}",
        ),
    ] {
        for size in 1..=text.len() {
            let (plain, calls) = parse_with(tools(), false, text, size);
            assert_eq!(
                (plain.as_str(), calls[0].1.as_str()),
                ("", arguments),
                "{size}"
            );
        }
    }
}
