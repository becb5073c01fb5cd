//! Server-sent events, as their standard has them: any line ends, data over several lines, comments.

use std::io::{self, BufRead};

/// Most bytes of an event.
const MOST: usize = 16 << 20;

/// Reads the data of events.
pub(super) struct Events<R> {
    reader: R,
    /// True after a carriage return: a line feed then belongs to it.
    after_return: bool,
    /// True before the first line, which may begin with a byte order mark.
    first: bool,
}

impl<R: BufRead> Events<R> {
    pub(super) fn new(reader: R) -> Self {
        Events {
            reader,
            after_return: false,
            first: true,
        }
    }

    /// The data of the next event that has some; `None` at the end. What is there of an event that the end
    /// cuts off counts as one.
    ///
    /// # Errors
    /// Errors of the reader; an event of more than 16 MB; text that is not UTF-8.
    pub(super) fn next(&mut self) -> io::Result<Option<String>> {
        let mut data: Option<String> = None;
        while let Some(line) = self.line()? {
            if line.is_empty() {
                if data.is_some() {
                    return Ok(data);
                }
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((&line, ""));
            if field != "data" {
                continue;
            }
            let value = value.strip_prefix(' ').unwrap_or(value);
            match &mut data {
                None => data = Some(value.to_owned()),
                Some(data) if data.len() + value.len() > MOST => return Err(too_long()),
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
            }
        }
        Ok(data)
    }

    /// The next line without its end.
    fn line(&mut self) -> io::Result<Option<String>> {
        let mut line = Vec::new();
        loop {
            let buffer = self.reader.fill_buf()?;
            if buffer.is_empty() {
                break;
            }
            let skip = usize::from(std::mem::take(&mut self.after_return) && buffer[0] == b'\n');
            let rest = &buffer[skip..];
            let end = rest.iter().position(|b| matches!(b, b'\n' | b'\r'));
            line.extend_from_slice(&rest[..end.unwrap_or(rest.len())]);
            let taken = skip + end.map_or(rest.len(), |end| end + 1);
            self.after_return = end.is_some_and(|end| rest[end] == b'\r');
            self.reader.consume(taken);
            if end.is_some() {
                return self.text(line).map(Some);
            }
            if line.len() > MOST {
                return Err(too_long());
            }
        }
        match line.is_empty() {
            true => Ok(None),
            false => self.text(line).map(Some),
        }
    }

    fn text(&mut self, line: Vec<u8>) -> io::Result<String> {
        let line = String::from_utf8(line).map_err(|e| io::Error::other(e.to_string()))?;
        match std::mem::take(&mut self.first) {
            true => Ok(line.strip_prefix('\u{feff}').unwrap_or(&line).to_owned()),
            false => Ok(line),
        }
    }
}

fn too_long() -> io::Error {
    io::Error::other(format!("an event of more than {MOST} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufReader, Cursor};

    fn read(text: &str, size: usize) -> Vec<String> {
        let reader = BufReader::with_capacity(size, Cursor::new(text.as_bytes().to_vec()));
        let mut events = Events::new(reader);
        std::iter::from_fn(|| events.next().unwrap()).collect()
    }

    #[test]
    fn events_are_the_same_whatever_the_line_ends_and_pieces() {
        for (text, expected) in [
            ("data: a\n\ndata: b\n\n", vec!["a", "b"]),
            ("data:a\r\n\r\ndata:  b\r\n\r\n", vec!["a", " b"]),
            ("data: a\r\rdata: b\r\r", vec!["a", "b"]),
            ("\u{feff}data: a\n\n", vec!["a"]),
            (
                ": comment\n\nid: 1\nevent: x\nretry: 3\ndata: a\n\n",
                vec!["a"],
            ),
            ("data: {\"x\":\ndata: 1}\n\n", vec!["{\"x\":\n1}"]),
            ("data: cut off", vec!["cut off"]),
            (
                "data\n\ndata: \u{e9}\u{1f389}\n\n",
                vec!["", "\u{e9}\u{1f389}"],
            ),
            ("\n\n\n", vec![]),
        ] {
            for size in 1..8 {
                assert_eq!(read(text, size), expected, "{text:?} by {size}");
            }
        }
    }
}
