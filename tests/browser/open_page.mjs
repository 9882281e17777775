// Opens a page of `host simulate --html` in headless Chromium, as a reader would: it draws every plot, asks for nothing from
// elsewhere, and its line of time, if it has one, can be zoomed, moved and put back.
//
// Usage: node open_page.mjs PAGE PLOTS [SCREENSHOT]
//   PLOTS: how many plots it has

import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";
import { pathToFileURL } from "node:url";

const [page_file, plots_wanted, screenshot] = process.argv.slice(2);
const browser = await puppeteer.launch({
    // The page is our own, and root has no other way.
    args: [...chromium.args, "--no-sandbox"],
    executablePath: await chromium.executablePath(),
    headless: "shell",
});
const problems = [];
const expect = (holds, what) => holds || problems.push(what);
try {
    const page = await browser.newPage();
    await page.setViewport({ width: 1280, height: 900 });
    page.on("console", message => problems.push(`the console has ${message.type()}: ${message.text()}`));
    page.on("pageerror", error => problems.push(`the script failed: ${error.message}`));
    page.on("request", request => expect(/^(file|data):/.test(request.url()), `the page asks for ${request.url()}`));
    await page.goto(pathToFileURL(page_file).href, { waitUntil: "load" });

    const plots = await page.$$eval(".plot", all => all.filter(plot => plot.checkVisibility()).map(plot => {
        const box = plot.querySelector("svg")?.getBoundingClientRect();
        const inside = [...plot.querySelectorAll("svg text")].every(text => {
            const own = text.getBoundingClientRect();
            return own.left >= box.left - 1 && own.right <= box.right + 1 && own.bottom <= box.bottom + 1;
        });
        return { id: plot.id, shapes: plot.querySelectorAll("path, rect").length, inside, height: box?.height ?? 0 };
    }));
    expect(plots.length === Number(plots_wanted), `there are ${plots.length} plots, not ${plots_wanted}`);
    for (const { id, shapes, inside, height } of plots) {
        expect(shapes > 2 && height > 50, `the plot ${id} is empty`);
        expect(inside, `a label of the plot ${id} is cut off`);
    }
    const width = await page.evaluate(() => document.documentElement.scrollWidth);
    expect(width <= 1280, `the page is ${width} pixels wide on a screen of 1280`);

    const canvas = await page.$("#timeline");
    if (canvas) {
        // All pixels of the line of time, as one text.
        const picture = () => page.$eval("#timeline", canvas => canvas.toDataURL());
        await canvas.scrollIntoView();
        const box = await canvas.boundingBox();
        const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
        const whole = await picture();
        await page.mouse.move(x, y);
        await page.mouse.wheel({ deltaY: -400 });
        const zoomed = await picture();
        expect(zoomed !== whole, "the wheel does not zoom");
        await page.mouse.down();
        await page.mouse.move(x - 120, y);
        await page.mouse.up();
        expect(await picture() !== zoomed, "dragging moves nothing");
        await page.mouse.click(x, y, { count: 2 });
        expect(await picture() === whole, "a double click does not bring everything back");
        await page.mouse.move(box.x + 40, box.y + 20);
        const under = await page.$eval("#under", note => note.textContent);
        expect(/tokens on worker/.test(under), `a request under the pointer is not told: ${JSON.stringify(under)}`);
    }

    await page.setViewport({ width: 480, height: 800 });
    if (screenshot) {
        await page.setViewport({ width: 1280, height: 900 });
        await page.screenshot({ path: screenshot, fullPage: true });
    }
} finally {
    await browser.close();
}
problems.forEach(problem => console.log(problem));
console.log(problems.length ? `${page_file}: ${problems.length} problems` : `${page_file}: as it should be`);
process.exit(problems.length ? 1 : 0);
