// Conversations, kept in this browser's IndexedDB and nowhere else.

const NAME = "parley";
const TABLE = "conversations";
let opening = null;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function run(mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const request = work(database.transaction(TABLE, mode).objectStore(TABLE));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Return all conversations, the newest first. */
export async function loadConversations() {
  const all = await run("readonly", (table) => table.getAll());
  return all.sort((one, other) => other.changed - one.changed);
}

export const saveConversation = (conversation) => run("readwrite", (table) => table.put(structuredClone(conversation)));
export const deleteConversation = (id) => run("readwrite", (table) => table.delete(id));
