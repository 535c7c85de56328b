//! The run-time compiler, loaded from its library where there is one.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use libloading::Library;

use super::error::DeviceError;
use super::sources::{HEADERS, OPTIONS, Source};

/// Turns sources into code for an architecture.
pub trait Compiler: Send + Sync + 'static {
    /// PTX of a file for a compute capability, such as `(9, 0)`.
    ///
    /// # Errors
    /// What the compiler said, or that there is none.
    fn compile(&self, source: &Source, capability: (u32, u32)) -> Result<String, DeviceError>;

    /// Its version, such as `(12, 8)`: a driver knows only code of compilers that are not newer than itself.
    ///
    /// # Errors
    /// There is none.
    fn version(&self) -> Result<(u32, u32), DeviceError>;
}

/// Names to try where none is given. Majors 12 and 13 have the same interface.
#[cfg(not(windows))]
const NAMES: [&str; 3] = ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"];
#[cfg(windows)]
const NAMES: [&str; 2] = ["nvrtc64_120_0.dll", "nvrtc64_130_0.dll"];

/// Where toolkits put their libraries, from the toolkit's own folder.
#[cfg(not(windows))]
const LIBRARIES: [&str; 2] = ["lib64", "targets/x86_64-linux/lib"];
#[cfg(windows)]
const LIBRARIES: [&str; 1] = ["bin"];

/// Folders of toolkits: those that the environment names, then where installers put them.
fn toolkits() -> impl Iterator<Item = PathBuf> {
    let named = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
    named.filter(|folder| !folder.is_empty()).map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda")])
}

/// What is tried where no library is named, in order: what the system finds under each name, then the toolkits.
fn candidates() -> Vec<PathBuf> {
    let by_name = NAMES.iter().map(PathBuf::from);
    let in_toolkits = toolkits().flat_map(|toolkit| {
        LIBRARIES.iter().flat_map(move |folder| {
            let folder = toolkit.join(folder);
            NAMES.iter().map(move |name| folder.join(name))
        })
    });
    by_name.chain(in_toolkits).collect()
}

type Program = *mut c_void;
type Status = c_int;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> Status;
type Size = unsafe extern "C" fn(Program, *mut usize) -> Status;

/// NVRTC.
pub struct Nvrtc {
    library: Library,
    /// The name it was found under.
    name: PathBuf,
}

impl Nvrtc {
    /// Loads the library at `path`, or the one that the system finds.
    ///
    /// # Errors
    /// [`DeviceError::NoCompiler`].
    pub fn open(path: Option<&Path>) -> Result<Self, DeviceError> {
        let names = path.map_or_else(candidates, |path| vec![path.to_owned()]);
        for name in names {
            // SAFETY: a library of this name is NVRTC, whose start-up code has no conditions.
            if let Ok(library) = unsafe { Library::new(&name) } {
                return Ok(Self { library, name });
            }
        }
        let tried = path.map_or_else(|| NAMES.join(" or "), |path| path.display().to_string());
        Err(DeviceError::NoCompiler { problem: format!("{tried} could not be loaded") })
    }

    /// The file it was loaded from, as far as the system tells, else the name it was found under.
    pub fn place(&self) -> PathBuf {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let file = self.name.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let loaded = maps.lines().filter_map(|line| Some(Path::new(&line[line.find('/')?..])));
        // The name may be a link: what is mapped then has a longer one.
        let stem = file.split_inclusive(".so").next().unwrap_or(file);
        let mut ours = loaded.filter(|path| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(stem))
        });
        ours.next().map_or_else(|| self.name.clone(), Path::to_owned)
    }

    /// A function of the library.
    ///
    /// # Safety
    /// `F` has to be its type.
    unsafe fn call<F: Copy>(&self, name: &CStr) -> Result<F, DeviceError> {
        // SAFETY: the caller knows the type.
        let found = unsafe { self.library.get::<F>(name.to_bytes_with_nul()) };
        found
            .map(|function| *function)
            .map_err(|error| DeviceError::NoCompiler { problem: error.to_string() })
    }

    /// A text of a program whose size one function tells and another gives.
    fn text(&self, program: Program, size: &CStr, get: &CStr) -> Result<String, DeviceError> {
        let mut bytes = 0;
        // SAFETY: the types are those of `nvrtcGetPTXSize` and `nvrtcGetProgramLogSize`, and of the functions beside them.
        let (size, get) = unsafe { (self.call::<Size>(size)?, self.call::<Text>(get)?) };
        // SAFETY: the program lives, the size is written.
        let status = unsafe { size(program, &mut bytes) };
        let mut text = vec![0u8; bytes];
        // SAFETY: the text has the size that was told.
        let status = if status == 0 { unsafe { get(program, text.as_mut_ptr().cast()) } } else { status };
        if status != 0 {
            return Err(DeviceError::NoCompiler { problem: format!("NVRTC answers with status {status}") });
        }
        while text.last() == Some(&0) {
            text.pop();
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn create(&self, source: &Source) -> Result<Program, DeviceError> {
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> Status;
        let [text, file] = [source.text, source.file].map(|text| c_string(source, text));
        let (text, file) = (text?, file?);
        let names = HEADERS.iter().map(|(name, _)| c_string(source, name)).collect::<Result<Vec<_>, _>>()?;
        let texts = HEADERS.iter().map(|(_, text)| c_string(source, text)).collect::<Result<Vec<_>, _>>()?;
        let [name_pointers, text_pointers] =
            [&names, &texts].map(|all| all.iter().map(|text| text.as_ptr()).collect::<Vec<_>>());
        let mut program = null_mut();
        // SAFETY: the type is that of `nvrtcCreateProgram`.
        let create = unsafe { self.call::<Create>(c"nvrtcCreateProgram")? };
        // SAFETY: all pointers live during the call, which copies what they point to.
        let status = unsafe {
            create(
                &mut program,
                text.as_ptr(),
                file.as_ptr(),
                HEADERS.len() as c_int,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        if status == 0 {
            Ok(program)
        } else {
            Err(failed(source, format!("NVRTC cannot begin (status {status})")))
        }
    }

    /// Compiles a program that was created; the code, or why not.
    fn finish(
        &self,
        source: &Source,
        program: Program,
        capability: (u32, u32),
    ) -> Result<String, DeviceError> {
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status;
        let architecture = format!("--gpu-architecture=compute_{}{}", capability.0, capability.1);
        let options = OPTIONS
            .iter()
            .copied()
            .chain([architecture.as_str()])
            .map(|option| c_string(source, option))
            .collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the type is that of `nvrtcCompileProgram`.
        let compile = unsafe { self.call::<Compile>(c"nvrtcCompileProgram")? };
        // SAFETY: the program lives, and so do the options.
        let status = unsafe {
            compile(
                program,
                pointers.len() as c_int,
                if pointers.is_empty() { null() } else { pointers.as_ptr() },
            )
        };
        if status == 0 {
            return self.text(program, c"nvrtcGetPTXSize", c"nvrtcGetPTX");
        }
        let log = self.text(program, c"nvrtcGetProgramLogSize", c"nvrtcGetProgramLog")?;
        let first = log.lines().find(|line| line.contains("error")).unwrap_or(log.trim());
        Err(failed(source, format!("{} (status {status})", first.trim())))
    }
}

impl Compiler for Nvrtc {
    fn compile(&self, source: &Source, capability: (u32, u32)) -> Result<String, DeviceError> {
        let mut program = self.create(source)?;
        let result = self.finish(source, program, capability);
        // SAFETY: the type is that of `nvrtcDestroyProgram`.
        let destroy =
            unsafe { self.call::<unsafe extern "C" fn(*mut Program) -> Status>(c"nvrtcDestroyProgram")? };
        // SAFETY: the program lives and is not used again.
        unsafe { destroy(&mut program) };
        result
    }

    fn version(&self) -> Result<(u32, u32), DeviceError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the type is that of `nvrtcVersion`.
        let version =
            unsafe { self.call::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status>(c"nvrtcVersion")? };
        // SAFETY: both numbers are written.
        match unsafe { version(&mut major, &mut minor) } {
            0 => Ok((major.unsigned_abs(), minor.unsigned_abs())),
            status => Err(DeviceError::NoCompiler { problem: format!("NVRTC answers with status {status}") }),
        }
    }
}

/// The compiler that is looked for when it is needed.
pub struct LazyNvrtc {
    path: Option<PathBuf>,
    found: std::sync::OnceLock<Result<Nvrtc, DeviceError>>,
}

impl LazyNvrtc {
    /// As [`Nvrtc::open`], later.
    pub fn new(path: Option<PathBuf>) -> Self {
        Self { path, found: std::sync::OnceLock::new() }
    }

    fn nvrtc(&self) -> Result<&Nvrtc, DeviceError> {
        self.found.get_or_init(|| Nvrtc::open(self.path.as_deref())).as_ref().map_err(Clone::clone)
    }
}

impl Compiler for LazyNvrtc {
    fn compile(&self, source: &Source, capability: (u32, u32)) -> Result<String, DeviceError> {
        self.nvrtc()?.compile(source, capability)
    }

    fn version(&self) -> Result<(u32, u32), DeviceError> {
        self.nvrtc()?.version()
    }
}

fn failed(source: &Source, problem: String) -> DeviceError {
    DeviceError::Compile { file: source.file.to_string(), problem }
}

fn c_string(source: &Source, text: &str) -> Result<CString, DeviceError> {
    CString::new(text).map_err(|_| failed(source, "a zero byte in a text".to_string()))
}
