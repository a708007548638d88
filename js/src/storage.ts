// Keeps checkpoints in the browser, in IndexedDB: a file is written wholly, or the one before it stays.

const DATABASE = "ort-trainer";
const STORE = "checkpoints";

/** Keeps the bytes of a checkpoint under a name, in place of those before. */
export async function saveCheckpoint(name: string, bytes: Uint8Array): Promise<void> {
  await transact("readwrite", (store) => store.put(bytes, name));
}

/** Returns the bytes under a name; undefined if there are none. */
export function loadCheckpoint(name: string): Promise<Uint8Array | undefined> {
  return transact("readonly", (store) => store.get(name) as IDBRequest<Uint8Array | undefined>);
}

/** Removes what is kept under a name. */
export async function deleteCheckpoint(name: string): Promise<void> {
  await transact("readwrite", (store) => store.delete(name));
}

async function transact<Result>(mode: IDBTransactionMode, run: (store: IDBObjectStore) => IDBRequest<Result>): Promise<Result> {
  const opening = indexedDB.open(DATABASE, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE);
  const database = await new Promise<IDBDatabase>((resolve, reject) => {
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
  try {
    const transaction = database.transaction(STORE, mode, { durability: "strict" });
    const request = run(transaction.objectStore(STORE));
    // The transaction, not the request, says that the bytes are kept.
    await new Promise<void>((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(transaction.error);
    });
    return request.result;
  } finally {
    database.close();
  }
}
