//! Reading server-sent events, as the standard has them: lines, fields, an empty line ends an event.

use std::io::{self, BufRead, Read};

/// Longest line that is accepted.
const LINE_LIMIT: u64 = 16 * 1024 * 1024;

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Frame {
    /// The last `id` seen, in this event or before.
    pub(super) id: Option<String>,
    /// Its name; `message` when it has none.
    pub(super) event: String,
    /// Its data, lines joined.
    pub(super) data: String,
}

/// Reads events one by one.
#[derive(Debug)]
pub(super) struct Reader<R> {
    input: R,
    id: Option<String>,
}

impl<R: BufRead> Reader<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input, id: None }
    }

    /// The next event with data; `None` at the end of the stream. An event cut off by the end is
    /// dropped, as the standard says.
    pub(super) fn next_frame(&mut self) -> io::Result<Option<Frame>> {
        let mut event = String::new();
        let mut data: Option<String> = None;
        while let Some(line) = self.line()? {
            if line.is_empty() {
                if let Some(data) = data.take() {
                    let event = if event.is_empty() { "message".to_owned() } else { event };
                    return Ok(Some(Frame { id: self.id.clone(), event, data }));
                }
                event.clear();
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((&line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "event" => value.clone_into(&mut event),
                "id" => self.id = Some(value.to_owned()),
                "data" => match &mut data {
                    Some(data) => {
                        data.push('\n');
                        data.push_str(value);
                    }
                    None => data = Some(value.to_owned()),
                },
                // Comments have an empty field name; `retry` and others do not concern a reader that
                // does not connect again by itself.
                _ => {}
            }
        }
        Ok(None)
    }

    /// A line without its end.
    fn line(&mut self) -> io::Result<Option<String>> {
        let mut line = Vec::new();
        let read = (&mut self.input).take(LINE_LIMIT).read_until(b'\n', &mut line)?;
        if line.last() != Some(&b'\n') {
            return match read as u64 {
                LINE_LIMIT => {
                    Err(io::Error::new(io::ErrorKind::InvalidData, "a line of the stream is too long"))
                }
                _ => Ok(None),
            };
        }
        line.pop();
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        String::from_utf8(line).map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(text: &str) -> Vec<Frame> {
        let mut reader = Reader::new(text.as_bytes());
        std::iter::from_fn(|| reader.next_frame().unwrap()).collect()
    }

    fn frame(id: Option<&str>, event: &str, data: &str) -> Frame {
        Frame { id: id.map(str::to_owned), event: event.to_owned(), data: data.to_owned() }
    }

    #[test]
    fn fields_comments_and_line_ends_are_read() {
        let text = ": hello\nretry: 2000\n\nid: 1\nevent: a\ndata: x\r\n\r\ndata:y\ndata:  z\n\n";
        assert_eq!(frames(text), [frame(Some("1"), "a", "x"), frame(Some("1"), "message", "y\n z")]);
    }

    #[test]
    fn an_event_without_its_end_is_dropped() {
        assert_eq!(frames("data: whole\n\ndata: cut"), [frame(None, "message", "whole")]);
        assert_eq!(frames("data: whole\n\ndata: cut\n"), [frame(None, "message", "whole")]);
    }

    #[test]
    fn a_name_without_data_is_no_event() {
        assert_eq!(frames("event: a\n\ndata: b\n\n"), [frame(None, "message", "b")]);
    }
}
